"""Start the image encoder beside the engine of an instance that computes prompts with images."""

from engine.interface import Engine
from engine.vision.encoded_image import MIB, EncoderLimits
from engine.vision.encoding_child import EncodingChild, TowerSettings
from engine.vision.image_encoder import ImageEncoder
from instance.config import InstanceConfig
from instance.load_thread import Loaded
from wire.types import Role


def with_image_encoder(config: InstanceConfig, engine: Engine, notes: tuple[str, ...]) -> Loaded:
    """Return the engine with its encoder, once its tower is loaded. Blocks for a long time. Raises PdserveError."""
    if not engine.info.takes_images or config.role is Role.DECODE:
        return Loaded(engine, notes)
    options, info = config.options, engine.info
    settings = TowerSettings(options.model, info.dtype, info.device, config.num_threads)
    limits = EncoderLimits(encode_s=options.image_timeout, cache_bytes=options.image_cache_bytes)
    encoder = ImageEncoder(EncodingChild(settings, limits), limits, info.dtype)
    try:
        size = encoder.start()
    except BaseException:
        encoder.close()
        engine.close()
        raise
    note = f"images: a vision tower of {size // MIB} MiB in a process of its own ({settings.device}, {settings.dtype})"
    return Loaded(engine, (*notes, note), encoder)
