"""Report B's model as a model type of one's own, in the file that `swift sft --custom_register_path` takes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutput

from tests.jobs.adapter_model import AdapterModel
from tests.jobs.swift.release import four, installed
from tests.jobs.swift.sft import MODEL_TYPE, audio_labels


class SwiftAdapterModel(AdapterModel):
    """The adapter's model with the arguments that ms-swift gives and the output that it takes."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:  # type: ignore[override]  # reason: it is called by ms-swift alone
        """input_ids, labels: [B, S] of one length, so that the attention mask hides nothing."""
        heard = audio_labels(input_ids, self.config.audio_vocab_size)
        return CausalLMOutput(loss=super().forward(input_ids, labels, heard, use_adapter=True))


if four(installed()):
    from swift.model import Model, ModelGroup, ModelLoader, ModelMeta, register_model
    from swift.template import TemplateMeta, register_template

    class AdapterLoader(ModelLoader):  # type: ignore[misc]  # reason: ms-swift is not installed where types are checked
        """Loads a folder as ms-swift loads every model but for its class."""

        def get_model(self, *args: Any, **kwargs: Any) -> Any:
            self.auto_model_cls = SwiftAdapterModel
            return super().get_model(*args, **kwargs)

        def get_processor(self, *args: Any, **kwargs: Any) -> Any:
            # transformers 5 takes Qwen2's own tokenizer for any Qwen2 folder, and that one drops this one's words.
            self.auto_tokenizer_cls = PreTrainedTokenizerFast
            return super().get_processor(*args, **kwargs)

    loads: dict[str, Any] = {"loader": AdapterLoader}
else:
    from swift.llm import (
        Model,
        ModelGroup,
        ModelMeta,
        TemplateMeta,
        get_model_tokenizer_with_flash_attn,
        register_model,
        register_template,
    )

    def load(model_dir: str, *args: Any, **kwargs: Any) -> Any:
        """(model, tokenizer) of a folder, as ms-swift loads every model but for its class."""
        return get_model_tokenizer_with_flash_attn(model_dir, *args, **{**kwargs, "automodel_class": SwiftAdapterModel})

    loads = {"get_function": load}

register_template(TemplateMeta(MODEL_TYPE, prefix=[], prompt=["{{QUERY}}"], chat_sep=None))
register_model(ModelMeta(MODEL_TYPE, [ModelGroup([Model()])], template=MODEL_TYPE, **loads))
