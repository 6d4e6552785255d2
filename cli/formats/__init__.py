"""What continuous integration reads of a result: Markdown, JUnit, GitHub's annotations."""
