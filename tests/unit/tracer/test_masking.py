"""Tests that credentials never reach a trace."""

from __future__ import annotations

import pytest

from tensortrace.tracer.masking import mask, mask_arguments

SECRET = "s3cr3t-value-0123456789"  # noqa: S105  # it stands for one


@pytest.mark.parametrize(
    "command",
    [
        ("train.py", "--api-key", SECRET),
        ("train.py", f"--api-key={SECRET}"),
        ("train.py", "--hf_token", SECRET, "--lr", "1e-3"),
        ("train.py", f"--wandb.api_key={SECRET}"),
        ("env", f"WANDB_API_KEY={SECRET}", "python", "train.py"),
        ("train.py", f"password={SECRET}"),
        ("train.py", f"s3.secret_access_key={SECRET}"),
        ("train.py", f"https://user:{SECRET}@host/path"),
        ("train.py", f"--data=https://{SECRET}@host/path"),
        ("train.py", f"https://host/data?token={SECRET}&split=train"),
        ("train.py", f"--data=https://host/d?X-Amz-Credential={SECRET}"),
        ("train.py", f"hf_{SECRET}"),
        ("train.py", f"--header=Bearer sk-{SECRET}"),
    ],
)
def test_no_form_of_a_credential_survives(command: tuple[str, ...]) -> None:
    masked = mask_arguments(command)
    assert len(masked) == len(command)
    assert SECRET not in " ".join(masked)
    assert "***" in " ".join(masked)


@pytest.mark.parametrize(
    "argument",
    [
        "--lr=1e-3",
        "--max-tokens=4096",
        "--tokenizer=gpt2",
        "--max_new_tokens",
        "--pad-token-id=0",
        "--data=https://host/path?split=train",
        "layers.0.attn",
        "/data/tokens/train.bin",
        "--author=someone",
    ],
)
def test_ordinary_arguments_stay_as_they_are(argument: str) -> None:
    assert mask(argument) == argument


def test_the_value_after_a_telling_option_is_masked_and_the_next_option_is_not() -> None:
    assert mask_arguments(("--token", "abc", "--steps", "3")) == ("--token", "***", "--steps", "3")
    assert mask_arguments(("--use-auth", "--steps", "3")) == ("--use-auth", "--steps", "3")
    assert mask_arguments(("--max-tokens", "4096")) == ("--max-tokens", "4096")


def test_what_surrounds_a_credential_in_a_url_stays_readable() -> None:
    assert mask("s3://me:pw@bucket/a?x=1&token=abc#f") == "s3://***@bucket/a?x=1&token=***#f"
