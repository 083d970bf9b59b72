"""Whether a model's layers are alike, so that few of them tell what many do."""

import torch

DEEP = 12  # layers from which on a model is predicted by its few: for less it hardly pays
PLAIN = bool, int, float, str, tuple, type(None)  # attributes by which code may choose


def layers_are_alike(model: torch.nn.Module) -> bool:
    """Whether all layers have the same parts, shapes and plain attributes but for their number.

    What a layer does by its number alone is not seen in it (`differ_by_number`). Layers that are
    left out by chance are not alike either.
    """
    if differ_by_number(model.config):
        return False
    if any(getattr(part, "layerdrop", 0) for part in model.modules()):
        return False
    config = model.config
    count = getattr(config, "num_hidden_layers", 0)
    by_layer = (v for v in vars(config).values() if isinstance(v, list) and len(v) == count)
    if any(one != values[0] for values in by_layer for one in values):
        return False
    lists = (part for part in model.modules() if isinstance(part, torch.nn.ModuleList))
    layers = next((found for found in lists if len(found) == count), [])
    first = _described(layers[0], 0) if layers else None
    return bool(layers) and all(_described(one, k) == first for k, one in enumerate(layers))


def differ_by_number(config) -> bool:
    """Whether some layers do other things than others by their number alone: the last ones of a
    Gemma 4 take keys and values of an earlier one, and to what the first ones of a Qwen3-VL return
    a picture's deeper features are added (DeepStack). That one's other tower takes half of the
    time, so that few layers would tell hardly sooner.

    >>> from transformers import LlamaConfig, Qwen3VLConfig
    >>> differ_by_number(LlamaConfig()), differ_by_number(Qwen3VLConfig())
    (False, True)
    """
    vision = getattr(config, "vision_config", None)
    deep = getattr(vision, "deepstack_visual_indexes", None)
    return bool(deep or getattr(config.get_text_config(), "num_kv_shared_layers", 0))


def _described(layer: torch.nn.Module, number: int) -> list[tuple]:
    """What code may choose by, of each part; `number` is the layer's own."""
    found = []
    for name, part in layer.named_modules():
        plain = {k: v for k, v in vars(part).items() if type(v) in PLAIN}
        own = {k: v for k, v in plain.items() if not (k.startswith("layer_") and v == number)}
        tensors = {**part._parameters, **part._buffers}
        shapes = {k: t if t is None else (t.shape, t.dtype) for k, t in tensors.items()}
        found.append((name, type(part), own, shapes))
    return found


def take_layers(config, layers: tuple) -> None:
    """Make a configuration one of layers of these kinds, its lists by layer among it."""
    config = config.get_text_config()
    count = config.num_hidden_layers
    for name, values in list(vars(config).items()):
        if isinstance(values, list) and len(values) == count and values == values[:1] * count:
            setattr(config, name, values[:1] * len(layers))
    config.num_hidden_layers = len(layers)
    types = getattr(config, "layer_types", None)
    if types and list(types) != list(layers):  # else they follow from the number
        config.layer_types = list(layers)
