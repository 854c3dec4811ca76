"""Our weights in other people's models, so that tests and benchmarks can compare them.

Hugging Face Marian and CTranslate2 are for tests only: the library imports neither.
Both need attention of width d_k = d_v = d_model // num_heads, post-norm, sinusoidal
positions and tied embeddings, as the paper's model has.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from transformer_lib.text import BOS, EOS, PAD
from transformer_lib.transformer import Transformer


def marian(model: Transformer):
    """The model as Hugging Face's MarianMTModel.

    Marian's position table has all sines first and then all cosines, where the paper's
    alternates. The table is not among its weights, so the features of the residual
    stream are put in its order instead: in the embeddings, at the input of each matrix
    that reads the stream, at the output of each that writes to it, in each LayerNorm.
    """
    from transformers import MarianConfig, MarianMTModel

    c = model.config
    settings = MarianConfig(
        vocab_size=c.vocab_size,
        d_model=c.d_model,
        encoder_layers=c.num_layers,
        decoder_layers=c.num_layers,
        encoder_attention_heads=c.num_heads,
        decoder_attention_heads=c.num_heads,
        encoder_ffn_dim=c.d_ff,
        decoder_ffn_dim=c.d_ff,
        activation_function="relu",
        scale_embedding=True,
        dropout=0.0,
        max_position_embeddings=1024,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        forced_eos_token_id=None,
        decoder_start_token_id=BOS,
        share_encoder_decoder_embeddings=True,
        tie_word_embeddings=True,
    )
    twin = MarianMTModel(settings).eval()
    state = {name: torch.zeros_like(x) for name, x in twin.state_dict().items()}
    written = marian_weights(model)
    unknown = written.keys() - state.keys()
    assert not unknown, f"Marian has no {sorted(unknown)[:3]}"
    for side in ("encoder", "decoder"):  # tables that are computed, not trained
        name = f"model.{side}.embed_positions.weight"
        if name in state:
            state[name] = twin.state_dict()[name]
    twin.load_state_dict(state | written)
    return twin


def marian_weights(model: Transformer) -> dict[str, Tensor]:
    """Our tensors by Marian's names, in Marian's order of features."""
    d = model.config.d_model
    order = torch.cat([torch.arange(0, d, 2), torch.arange(1, d, 2)])  # sines, cosines
    table = model.src_embedding.weight.detach()[:, order]
    out = {"model.shared.weight": table, "lm_head.weight": table}
    for side in ("encoder", "decoder"):
        out[f"model.{side}.embed_tokens.weight"] = table
    for prefix, layer in layers_of(model):
        blocks = [("self_attn", layer.self_attention)]
        norms = [("self_attn_layer_norm", layer.residual_1)]
        if hasattr(layer, "cross_attention"):
            blocks.append(("encoder_attn", layer.cross_attention))
            norms.append(("encoder_attn_layer_norm", layer.residual_2))
            norms.append(("final_layer_norm", layer.residual_3))
        else:
            norms.append(("final_layer_norm", layer.residual_2))
        for name, block in blocks:
            for x in "qkv":
                weight = getattr(block, f"w_{x}").weight.detach()
                out[f"model.{prefix}.{name}.{x}_proj.weight"] = weight[:, order]
            weight = block.w_o.weight.detach()
            out[f"model.{prefix}.{name}.out_proj.weight"] = weight[order]
        w_1, w_2 = layer.feed_forward.w_1, layer.feed_forward.w_2
        out[f"model.{prefix}.fc1.weight"] = w_1.weight.detach()[:, order]
        out[f"model.{prefix}.fc1.bias"] = w_1.bias.detach()
        out[f"model.{prefix}.fc2.weight"] = w_2.weight.detach()[order]
        out[f"model.{prefix}.fc2.bias"] = w_2.bias.detach()[order]
        for name, residual in norms:
            for part in ("weight", "bias"):
                tensor = getattr(residual.norm, part).detach()[order]
                out[f"model.{prefix}.{name}.{part}"] = tensor
    return out


def layers_of(model: Transformer):
    """Each layer with the place where Marian has it."""
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        for i, layer in enumerate(stack.layers):
            yield f"{side}.layers.{i}", layer


def token_names(vocab_size: int) -> list[str]:
    """A name for each id; CTranslate2 reads and writes names."""
    names = [f"t{i}" for i in range(vocab_size)]
    names[PAD], names[1], names[BOS], names[EOS] = "<pad>", "<unk>", "<s>", "</s>"
    return names


def ctranslate2_model(model: Transformer, folder: Path, quantization=None) -> Path:
    """Write the model as a CTranslate2 model; give its folder."""
    from ctranslate2.specs import TransformerSpec
    from ctranslate2.specs.common_spec import Activation

    c = model.config
    spec = TransformerSpec.from_config(
        c.num_layers, c.num_heads, pre_norm=False, activation=Activation.RELU
    )
    table = model.src_embedding.weight.detach().numpy()
    positions = model.src_positions(1024).numpy()
    spec.encoder.embeddings[0].weight = table.copy()  # a copy: optimize works in place
    spec.decoder.embeddings.weight = table.copy()
    spec.decoder.projection.weight = table.copy()
    for side in (spec.encoder, spec.decoder):
        side.scale_embeddings = np.float32(c.d_model**0.5)
        side.position_encodings.encodings = positions.copy()
    stacks = ((spec.encoder, model.encoder), (spec.decoder, model.decoder))
    for theirs, ours in stacks:
        for target, layer in zip(theirs.layer, ours.layers, strict=True):
            fill_layer(target, layer)
    names = token_names(c.vocab_size)
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    spec.config.layer_norm_epsilon = 1e-5
    spec.config.decoder_start_token = "<s>"
    spec.validate()
    spec.optimize(quantization=quantization)
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))
    return folder


def fill_layer(target, layer) -> None:
    """Put one of our layers into one of CTranslate2's."""
    a = layer.self_attention
    norms = [layer.residual_1, layer.residual_2]
    fill_linear(target.self_attention.linear[0], a.w_q, a.w_k, a.w_v)
    fill_linear(target.self_attention.linear[1], a.w_o)
    places = [target.self_attention.layer_norm, target.ffn.layer_norm]
    if hasattr(layer, "cross_attention"):
        a = layer.cross_attention
        fill_linear(target.attention.linear[0], a.w_q)
        fill_linear(target.attention.linear[1], a.w_k, a.w_v)
        fill_linear(target.attention.linear[2], a.w_o)
        norms.append(layer.residual_3)
        places.insert(1, target.attention.layer_norm)
    fill_linear(target.ffn.linear_0, layer.feed_forward.w_1)
    fill_linear(target.ffn.linear_1, layer.feed_forward.w_2)
    for place, residual in zip(places, norms, strict=True):
        place.gamma = residual.norm.weight.detach().numpy().copy()
        place.beta = residual.norm.bias.detach().numpy().copy()


def fill_linear(target, *linears) -> None:
    """The matrices of one or more linear layers, stacked; a missing bias is zero."""
    weight = torch.cat([linear.weight.detach() for linear in linears])  # a copy
    biases = [
        torch.zeros(len(linear.weight)) if linear.bias is None else linear.bias.detach()
        for linear in linears
    ]
    target.weight, target.bias = weight.numpy(), torch.cat(biases).numpy()
