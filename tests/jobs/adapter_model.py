"""Report B's model, as its user wrote it: Qwen2 whose audio logits go through a custom adapter (ms-swift#3262).

The lines of this file (and of a file given with --adapter) count as the user's own: a verdict names the one that
touched a partitioned parameter. Every variant of user code that the job knows is one row of `USER_CODE`; each term
that it adds to the loss is a line of its own below, so that the line says what was wrong with it.

Shapes: B sequences, S tokens, T text tokens, A audio tokens, L code layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
import transformers

TEXT_VOCABULARY, AUDIO_VOCABULARY, CODE_LAYERS = 96, 32, 3
AUDIO_VOCABULARY_OF_REPORT = 4160
"""Three layers of it make the 12480 of the report's message, the size of the bias. The case of that size keeps 32
inputs: with 4160 of them, whose number no message shows, a rank takes 1.2 GB."""
HIDDEN = 64


@dataclasses.dataclass(frozen=True)
class UserCode:
    """What the user's code does beside calling the adapter.

    term: what is added to the loss: "keepalive" (sum of the parameters times 0) or "l2" (a penalty with a gradient).
    place: where in the forward pass, "before" or "after" the adapter runs. reach: how it gets at the parameters,
        "iterate" (.parameters()), "attribute" (module.linear.weight) or "gathered" (iterated in GatheredParameters).
    used: in which forward passes the adapter runs: "always", "never", "even-steps" or "rank-0".
    dummy_forward: where it does not run, run it on a dummy input and add its output times 0.
    norm: scale the adapter's output by the detached norm of a parameter reached by "iterate" or "attribute".
    setup: what the user does around the model: "external" (register_external_parameter), "leaf"
        (set_z3_leaf_modules) or "threshold" (a persistence threshold above every size).
    """

    term: str | None = None
    place: str = "after"
    reach: str = "iterate"
    used: str = "always"
    dummy_forward: bool = False
    norm: str | None = None
    setup: str | None = None
    report_sizes: bool = False

    def uses_adapter(self, rank: int, step: int) -> bool:
        """Whether the adapter runs in the forward passes of this optimizer step on this rank."""
        return {"always": True, "never": False, "even-steps": step % 2 == 0, "rank-0": rank == 0}[self.used]

    def reads_nothing(self, step: int, index: int) -> bool:
        """Whether what this code iterates over is partitioned, in micro-batch `index` of a step at ZeRO-3.

        Where the adapter ran before, its parameters stay for backward (stage3_max_reuse_distance) from the second
        forward pass on: DeepSpeed then knows in which order they are needed. In the first it lets go of them.
        """
        if self.norm != "iterate" and (self.term is None or self.reach != "iterate" or self.setup == "external"):
            return False
        ran = self.norm is not None or (self.place == "after" and self.used != "never")
        return not ran or (step == 0 and index == 0)


USER_CODE: dict[str, UserCode] = {
    # As the report prints it, without its keep-alive.
    "plain": UserCode(),
    # The report: sum(p.sum() for p in self.group_decode_adapter.parameters()) * 0.0, and a term with a gradient.
    "keepalive-after": UserCode("keepalive"),
    "keepalive-before": UserCode("keepalive", "before"),
    "keepalive-unused": UserCode("keepalive", used="never"),
    "report-sizes": UserCode("keepalive", report_sizes=True),
    "l2-after": UserCode("l2"),
    "l2-before": UserCode("l2", "before"),
    "l2-unused": UserCode("l2", used="never"),
    # No error is raised, the numbers are wrong.
    "used-in-some-steps": UserCode(used="even-steps"),
    "detached-norm": UserCode(norm="iterate"),
    # What the user can do, and what does not help.
    "detached-norm-attribute": UserCode(norm="attribute"),
    "keepalive-attribute": UserCode("keepalive", reach="attribute"),
    "keepalive-attribute-before": UserCode("keepalive", "before", reach="attribute"),
    "keepalive-attribute-unused": UserCode("keepalive", reach="attribute", used="never"),
    "keepalive-attribute-some-steps": UserCode("keepalive", reach="attribute", used="even-steps"),
    "l2-attribute": UserCode("l2", reach="attribute"),
    "dummy-forward": UserCode(used="even-steps", dummy_forward=True),
    "dummy-forward-unused": UserCode(used="never", dummy_forward=True),
    "dummy-forward-one-rank": UserCode(used="rank-0", dummy_forward=True),
    "external-parameter": UserCode("keepalive", setup="external"),
    "external-parameter-before": UserCode("keepalive", "before", setup="external"),
    "external-parameter-unused": UserCode("keepalive", used="never", setup="external"),
    "external-parameter-l2": UserCode("l2", setup="external"),
    "external-parameter-some-steps": UserCode("keepalive", used="even-steps", setup="external"),
    "gathered-sum": UserCode("keepalive", reach="gathered"),
    "gathered-sum-before": UserCode("keepalive", "before", reach="gathered"),
    "gathered-sum-unused": UserCode("keepalive", reach="gathered", used="never"),
    "gathered-sum-l2": UserCode("l2", reach="gathered"),
    "gathered-sum-some-steps": UserCode("keepalive", reach="gathered", used="even-steps"),
    "leaf-module": UserCode("keepalive", setup="leaf"),
    "persistence-threshold": UserCode("keepalive", setup="threshold"),
}


class Linear_GroupDecodeAdapter(torch.nn.Module):  # type: ignore[misc]  # reason: torch is untyped where mypy runs
    """The report's adapter: one linear layer from A audio logits to those of L code layers."""

    def __init__(self, inputs: int, audio_vocab_size: int, code_layer: int, init: str) -> None:
        """init: "disabled" builds the layer under zero.Init(enabled=False), as the report does; else plainly."""
        super().__init__()
        with deepspeed.zero.Init(enabled=False) if init == "disabled" else contextlib.nullcontext():
            self.linear = torch.nn.Linear(inputs, code_layer * audio_vocab_size)

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, S, A] -> [B, S, L * A]."""
        return self.linear(logits)


def load_class(spec: str) -> type[torch.nn.Module]:
    """The class of "FILE.py:Class"; its constructor takes the hidden size."""
    file, _, name = spec.rpartition(":")
    module_spec = importlib.util.spec_from_file_location("user_adapter", Path(file).resolve())
    if module_spec is None or module_spec.loader is None:
        raise ImportError(f"--adapter: {file} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    found: type[torch.nn.Module] = getattr(module, name)
    return found


def audio_vocabulary(code: str) -> int:
    """Audio tokens of each code layer."""
    return AUDIO_VOCABULARY_OF_REPORT if USER_CODE[code].report_sizes else AUDIO_VOCABULARY


def tiny_config(code: str, init: str, own: str | None) -> Any:
    """Configuration of the tiny Qwen2: hidden 64, 2 layers, untied embeddings, text and audio tokens.

    init: "disabled", "plain" or "outside" (the caller adds the adapter). own: "FILE.py:Class" or None.
    """
    config = transformers.Qwen2Config(
        vocab_size=TEXT_VOCABULARY + AUDIO_VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    config.audio_vocab_size = audio_vocabulary(code)
    config.user_code = code
    config.adapter_init = init
    config.own_adapter = own
    return config


def by_attribute(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Every parameter through attribute look-up, `module.linear.weight`: the look-up gathers it under ZeRO-3."""
    for owner in module.modules():
        for name in list(owner._parameters):
            parameter = getattr(owner, name)
            if parameter is not None:
                yield parameter


class AdapterModel(transformers.Qwen2ForCausalLM):  # type: ignore[misc]  # reason: untyped where mypy runs
    """Qwen2 with the adapter on its audio logits, or with a user's own module on its hidden states."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.user_code = USER_CODE[config.user_code]
        if config.adapter_init != "outside":
            self.add_adapter()
        self.post_init()

    def add_adapter(self) -> None:
        """Build the adapter, wherever the caller stands with regard to zero.Init."""
        config = self.config
        if config.own_adapter is not None:
            self.group_decode_adapter = load_class(config.own_adapter)(config.hidden_size)
        else:
            self.group_decode_adapter = Linear_GroupDecodeAdapter(
                AUDIO_VOCABULARY, config.audio_vocab_size, CODE_LAYERS, config.adapter_init
            )

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, audio_labels: torch.Tensor, use_adapter: bool
    ) -> torch.Tensor:
        """The loss. input_ids, labels: [B, S]; audio_labels: [B, L, S]; use_adapter: whether the adapter runs."""
        code = self.user_code
        extra = self.term() if code.place == "before" else 0.0
        hidden = self.model(input_ids=input_ids, use_cache=False)[0]
        own = self.config.own_adapter is not None
        if own and use_adapter:
            hidden = self.adapted(hidden)
        logits = self.lm_head(hidden)
        text = logits[..., :TEXT_VOCABULARY]
        loss = F.cross_entropy(text[:, :-1].float().reshape(-1, TEXT_VOCABULARY), labels[:, 1:].reshape(-1))
        if use_adapter and not own:
            loss = loss + self.audio_loss(logits[..., TEXT_VOCABULARY:], audio_labels)
        if not use_adapter and code.dummy_forward:
            dummy = (hidden if own else logits[..., TEXT_VOCABULARY:])[:, :1].detach() * 0.0
            loss = loss + self.adapted(dummy).sum() * 0.0
        if code.place == "after":
            extra = extra + self.term()
        return loss + extra

    def audio_loss(self, audio_logits: torch.Tensor, audio_labels: torch.Tensor) -> torch.Tensor:
        """Cross entropy of all code layers. audio_logits: [B, S, A]; audio_labels: [B, L, S]."""
        size = self.config.audio_vocab_size
        decoded = self.adapted(audio_logits)  # [B, S, L * A]
        layers = torch.split(decoded, [size] * CODE_LAYERS, dim=2)
        stacked = torch.cat(tuple(layer.unsqueeze(1) for layer in layers), dim=1)  # [B, L, S, A]
        return F.cross_entropy(stacked.float().reshape(-1, size), audio_labels.reshape(-1))

    def adapted(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the adapter makes of its inputs."""
        outputs = self.group_decode_adapter(inputs)
        if self.user_code.norm == "iterate":
            outputs = outputs * next(iter(self.group_decode_adapter.parameters())).detach().norm()
        if self.user_code.norm == "attribute":
            outputs = outputs * next(by_attribute(self.group_decode_adapter)).detach().norm()
        return outputs

    def term(self) -> Any:
        """What the user adds to the loss, a scalar tensor, or 0."""
        code = self.user_code
        if code.term is None:
            return 0.0
        if code.reach == "attribute":
            return self.keepalive_by_attribute() if code.term == "keepalive" else self.l2_by_attribute()
        if code.reach == "gathered":
            with deepspeed.zero.GatheredParameters(list(self.group_decode_adapter.parameters())):
                return self.keepalive() if code.term == "keepalive" else self.l2()
        return self.keepalive() if code.term == "keepalive" else self.l2()

    def keepalive(self) -> Any:
        """The report's line: keeps the adapter in the graph without changing the loss."""
        return sum(p.sum() for p in self.group_decode_adapter.parameters()) * 0.0

    def l2(self) -> Any:
        """A penalty on the adapter's weights."""
        return sum((p**2).sum() for p in self.group_decode_adapter.parameters()) * 0.05

    def keepalive_by_attribute(self) -> Any:
        """As `keepalive`, in a way that works."""
        return sum(p.sum() for p in by_attribute(self.group_decode_adapter)) * 0.0

    def l2_by_attribute(self) -> Any:
        """As `l2`, reached by attribute."""
        return sum((p**2).sum() for p in by_attribute(self.group_decode_adapter)) * 0.05
