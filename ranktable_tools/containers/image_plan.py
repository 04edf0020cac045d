"""Decide how to build an image on a base image, or why it cannot be built. Pure."""

from dataclasses import dataclass
from typing import Literal, get_args

from ranktable_tools.containers.base_image import BaseImage, Version, parse_version
from ranktable_tools.containers.vision import vision_of
from ranktable_tools.errors import RanktableError

ImageKind = Literal["cpu", "cuda", "ascend"]
IMAGE_KINDS: tuple[ImageKind, ...] = get_args(ImageKind)
_MIN_PYTHON = (3, 11)
_MIN_TORCH = (2, 10)


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """The contents of the image; `torch_npu` only for ascend."""

    kind: ImageKind
    base: BaseImage
    torch: Version
    torch_npu: Version | None = None

    @property
    def notes(self) -> list[str]:
        """Lines on what is kept from the base image and what is installed."""
        origin = "the base image's" if self.base.torch is not None else "to be installed"
        notes = [f"torch {self.torch.text} ({origin})"]
        if self.torch_npu is not None:
            origin = "the base image's" if self.base.torch_npu is not None else "to be installed"
            notes.append(f"torch_npu {self.torch_npu.text} ({origin})")
        return notes


def plan_image(base: BaseImage, pinned_torch: str, kind: ImageKind | None = None) -> ImagePlan:
    """Return the plan; `pinned_torch` is installed if the base image has no torch.

    Raises RanktableError naming both values if base image, kind and torch are incompatible.
    """
    found = kind or _kind_of(base)
    _check_python(base)
    if found == "ascend" and not base.has_cann:
        raise _refuse_base(base, "has no CANN in /usr/local/Ascend", "use one of quay.io/ascend/cann, or --device=cpu")
    torch = base.torch or _requested_version(base.torch_npu) or parse_version(pinned_torch)
    _check_torch(base, torch, found)
    _check_vision(base, torch)
    return ImagePlan(
        found, base, torch, (base.torch_npu or parse_version(torch.release)) if found == "ascend" else None
    )


def _kind_of(base: BaseImage) -> ImageKind:
    if base.has_cann:
        return "ascend"
    return "cuda" if base.torch is not None and "+cu" in base.torch.text else "cpu"


def _check_python(base: BaseImage) -> None:
    if base.python is None:
        raise _refuse_base(base, "has no python3", "use one with Python 3.11 or newer")
    if base.python.minor < _MIN_PYTHON:
        raise _refuse_base(base, f"has Python {base.python.text}, but pdserve needs 3.11 or newer", "use a newer one")


def _check_torch(base: BaseImage, torch: Version, kind: ImageKind) -> None:
    if torch.minor < _MIN_TORCH:
        raise _refuse_base(
            base, f"has torch {torch.text}, but pdserve needs 2.10 or newer", "use one with a newer torch, or without"
        )
    build = torch.text.partition("+")[2]
    if (kind == "cuda" and build == "cpu") or (kind == "ascend" and build.startswith("cu")):
        raise _refuse_base(base, f"has torch {torch.text}, which is not a build for {kind}", "use one without torch")
    if base.torch_npu is None:
        return
    if kind != "ascend":
        raise _refuse_base(
            base, f"has torch_npu {base.torch_npu.text}, but the image is for {kind}", "use --device=ascend"
        )
    if base.torch_npu.numbers != torch.numbers:
        what = f"has torch {torch.text} and torch_npu {base.torch_npu.text}, which needs torch {base.torch_npu.release}"
        raise _refuse_base(base, what, "use one in which they match, or without them")


def _check_vision(base: BaseImage, torch: Version) -> None:
    for name, vision in (("torchvision", base.torchvision), ("torchvision_npu", base.torchvision_npu)):
        if vision is not None and "{}.{}".format(*vision.minor) != vision_of(torch):
            what = f"has {name} {vision.text}, but torch {torch.text} needs {name} {vision_of(torch)}"
            raise _refuse_base(base, what, f"use one without {name}")


def _requested_version(torch_npu: Version | None) -> Version | None:
    return None if torch_npu is None else parse_version(torch_npu.release)


def _refuse_base(base: BaseImage, what: str, remedy: str) -> RanktableError:
    return RanktableError(f"--base-image {base.name} {what}: {remedy}")
