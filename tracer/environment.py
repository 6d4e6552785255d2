"""What surrounds a run, for attribution: versions, flags, commit, chosen variables, and no secrets."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensortrace.tracer.masking import mask, mask_arguments
from tensortrace.tracer.types import Environment

PACKAGES = (
    "tensortrace", "torch", "numpy", "transformers", "accelerate", "deepspeed", "lightning",
    "megatron-core", "torchtitan", "triton", "flash-attn", "transformer-engine",
)  # fmt: skip
"""The packages whose versions can change a training's numbers."""

VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK",
    "TORCHELASTIC_RESTART_COUNT", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED",
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS",
    "NCCL_P2P_DISABLE", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE",
    "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "ACCELERATE_MIXED_PRECISION", "SLURM_PROCID",
    "SLURM_NTASKS", "SLURM_JOB_ID",
)  # fmt: skip
"""The only environment variables that are written down, where they are set."""


START = "start."
"""Prefix of the flags that say how a run was asked to begin (``docs/start.md``)."""


def launch_environment(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    folder: Path,
    start: Mapping[str, str] | None = None,
) -> Environment:
    """Return what the launcher knows: package versions, git commit of ``folder``, variables, command.

    ``start`` are the options by which the run begins elsewhere. Imports none of the packages.
    """
    commit, dirty = git_state(folder)
    return Environment(
        versions=package_versions(),
        flags=_start_flags(start),
        variables=allowed_variables(environ),
        command=mask_arguments(command),
        commit=commit,
        dirty=dirty,
    )


def rank_environment(
    command: Sequence[str], environ: Mapping[str, str], *, start: Mapping[str, str] | None = None
) -> Environment:
    """Return what a rank knows: versions and flags of its own torch, its variables, its arguments.

    Starts no process and touches no device that the training has not touched.
    """
    return Environment(
        versions=package_versions() | _torch_versions(),
        flags=torch_flags() | _start_flags(start),
        variables=allowed_variables(environ),
        command=mask_arguments(command),
    )


def _start_flags(start: Mapping[str, str] | None) -> dict[str, str]:
    return {START + name: value for name, value in (start or {}).items()}


def package_versions() -> dict[str, str]:
    """Return the versions of Python, the platform and every installed package of ``PACKAGES``."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def torch_flags() -> dict[str, str]:
    """Return torch's settings that change numbers: precision, determinism, threads."""
    import torch

    flags: dict[str, object] = {
        "default_dtype": torch.get_default_dtype(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "bf16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "fp16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "threads": torch.get_num_threads(),
        "initial_seed": torch.initial_seed(),
    }
    return {name: str(value) for name, value in flags.items()}


def allowed_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``VARIABLES`` that are set, masked like arguments."""
    return {name: mask(environ[name]) for name in VARIABLES if name in environ}


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Return the commit of the work tree around ``folder`` and whether it has changes; None if unknown."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None, None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return commit, None if changes is None else bool(changes)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        outcome = subprocess.run(  # noqa: S603  # fixed arguments, no shell
            ["git", "--no-optional-locks", *arguments],  # noqa: S607  # the user's own git
            cwd=folder, capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return outcome.stdout.strip() if outcome.returncode == 0 else None


def _torch_versions() -> dict[str, str]:
    import torch

    built = {"cuda": torch.version.cuda, "hip": torch.version.hip, "git": torch.version.git_version}
    return {"torch": str(torch.__version__)} | {f"torch.{name}": text for name, text in built.items() if text}
