"""Flags that every ms-swift cell is given beside the report's: what the case judges, and what a cell has no use for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.jobs import plain_optimizer

ORDER = "JOBS_SWIFT_CASE"
"""The variable that names the case's file for swift's ranks: {"payload", "workdir"}."""

QUIET: Mapping[str, Any] = {
    # Nothing of the network, nothing that another process would do, nothing that is written besides the log.
    "check_model": "false",
    "attn_impl": "eager",
    "gradient_checkpointing": "false",
    "dataloader_num_workers": 0,
    "dataset_num_proc": 1,
    "load_from_cache_file": "false",
    "split_dataset_ratio": 0,
    "eval_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "add_version": "false",
}


def judged(payload: Mapping[str, Any], warmup: int = 0) -> dict[str, Any]:
    """What the case judges, spelled out: ms-swift's own defaults are a cosine schedule and other betas."""
    optimizer = plain_optimizer.settings(payload["case"])
    return {
        "optim": plain_optimizer.IN_TRANSFORMERS[optimizer.kind],
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": "constant_with_warmup" if warmup else "constant",
        "warmup_steps": warmup,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": payload["clip"] or 0.0,
        **{name: str(value).lower() for name, value in payload["backend"]["training_arguments"].items()},
    }


def words(flags: Mapping[str, Any]) -> list[str]:
    """As a command line has them."""
    return [word for name, value in flags.items() for word in (f"--{name}", f"{value}")]


def plugins(own: Path, corrections: Sequence[Path]) -> list[str]:
    """Our plugin first: what it listens to is what the corrections correct."""
    return ["--external_plugins", *map(str, (own, *corrections))]
