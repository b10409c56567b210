"""Random views of images for contrastive learning: MoCo's augmentations, on batches of tensors.

Every image of a batch has its own parameters. They are drawn on the CPU from a given generator, so that a GPU sees the
same views. The reference of each operation is torchvision's transform of a single image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from fl_core.errors import UsageError

GREY = (0.2989, 0.587, 0.114)  # of ITU-R 601, as in torchvision
AREA, GREYED, JITTER = (0.2, 1.0), 0.2, 0.4
"""MoCo's range of a crop's share of the area, probability of grey, and colour strength.

Brightness, contrast and saturation change by up to this share, and the hue by up to
this part of its circle.
"""


@dataclass(frozen=True)
class MoCoViews:
    """A random view of every image by MoCo's augmentation, version 1 (He et al. 2020; the authors' released code).

    The steps are in this order:

    1. Crop a share of the area in :data:`AREA`, with an aspect ratio between 3/4 and 4/3, and resize it (bilinear).
    2. Turn to grey with probability :data:`GREYED`.
    3. Change brightness, contrast, saturation and hue by up to :data:`JITTER`, in a random order.
    4. Mirror with probability 1/2.

    Colour operations need pixels between 0 and 1. So normalisation by ``mean`` and ``std`` is undone before and
    repeated after them. Pixels of images that were never scaled are clipped to their batch's own range instead.
    Saturation, hue and grey apply to images of three channels only.

    Attributes:
        mean, std: one number for each channel, by which the images were normalised.
            Empty means that they were not.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __call__(self, images: Tensor, draw: torch.Generator) -> Tensor:
        """Return one view of each image, [n, C, H, W]. The images stay unchanged.

        Args:
            images: floats [n, C, H, W].
            draw: the generator of all random numbers, on the CPU.

        Raises:
            UsageError: the samples are not images.
        """
        if images.ndim != 4:
            got_shape = tuple(images.shape)
            raise UsageError(
                f"samples must be images [n, channels, height, width] for views; got shape {got_shape}."
            )
        n, channels, height, width = images.shape
        boxes = crop_boxes(n, height, width, draw)
        is_grey = torch.rand(n, generator=draw) < GREYED
        strengths = JITTER * (2 * torch.rand(n, 4, generator=draw) - 1)
        order = torch.rand(n, 4, generator=draw).argsort(1)
        is_mirrored = torch.rand(n, generator=draw) < 0.5
        x = crop_resize(images, boxes.to(images.device), is_mirrored.to(images.device))
        if self.mean:
            mean = x.new_tensor(self.mean).view(-1, 1, 1)
            std = x.new_tensor(self.std).view(-1, 1, 1)
            x = x * std + mean
        lowest = min(0.0, float(x.min()))
        highest = max(1.0, float(x.max()))
        if channels == 3:
            affected_images = is_grey.to(x.device).view(-1, 1, 1, 1)
            x = torch.where(affected_images, grey(x).expand_as(x), x)
        x, strengths = x.clone(), strengths.to(x)
        for position in range(order.shape[1]):
            for k in range(4 if channels == 3 else 2):
                affected_images = torch.nonzero(order[:, position] == k).squeeze(1)
                if len(affected_images):
                    affected_images = affected_images.to(x.device, non_blocking=True)
                    strength, old_pixels = (
                        strengths[affected_images, k].view(-1, 1, 1, 1),
                        x[affected_images],
                    )
                    if k == 3:
                        new_pixels = _rotate_hue(old_pixels, strength)
                    else:  # away from black, from its mean grey, or from grey
                        mean_grey = grey(old_pixels).mean((1, 2, 3), True)
                        reference = [
                            old_pixels.new_zeros(()),
                            mean_grey,
                            grey(old_pixels),
                        ][k]
                        new_pixels = reference + (1 + strength) * (
                            old_pixels - reference
                        )
                    x[affected_images] = new_pixels.clamp(lowest, highest)
        if self.mean:
            return (x - mean) / std
        return x


def crop_boxes(n: int, height: int, width: int, draw: torch.Generator) -> Tensor:
    """Draw random boxes (top, left, height, width), int64 [n, 4], as torchvision's RandomResizedCrop does.

    Area and aspect ratio are drawn ten times. The first that fits is placed at random. If none fits, the box is the
    largest central one with a ratio between 3/4 and 4/3.

    Args:
        n: number of boxes.
        height, width: size of the images in pixels.
        draw: a generator on the CPU, where the boxes are, too.
    """
    trials = torch.rand(n, 10, 2, generator=draw, dtype=torch.float64)
    offsets = torch.rand(n, 2, generator=draw, dtype=torch.float64)
    least_share, most_share = AREA
    area = height * width * (least_share + (most_share - least_share) * trials[..., 0])
    ratio = ((2 * trials[..., 1] - 1) * math.log(4 / 3)).exp()
    w = (area * ratio).sqrt().round()
    h = (area / ratio).sqrt().round()
    fits = (w >= 1) & (w <= width) & (h >= 1) & (h <= height)
    first_fit = fits.to(torch.int64).argmax(1, keepdim=True)
    w = w.gather(1, first_fit).squeeze(1)
    h = h.gather(1, first_fit).squeeze(1)
    top = (offsets[:, 0] * (height - h + 1)).floor()
    left = (offsets[:, 1] * (width - w + 1)).floor()
    random_boxes = torch.stack([top, left, h, w], 1).long()
    max_width = min(width, round(height * 4 / 3))
    max_height = min(height, round(width * 4 / 3))
    top_centre = (height - max_height) // 2
    left_centre = (width - max_width) // 2
    central_box = torch.tensor([top_centre, left_centre, max_height, max_width])
    return torch.where(fits.any(1, keepdim=True), random_boxes, central_box)


def crop_resize(images: Tensor, boxes: Tensor, mirrored: Tensor) -> Tensor:
    """Return boxes of images [n, C, H, W] resized to H x W (bilinear), with some of them mirrored.

    Args:
        boxes: the box of each image (top, left, height, width), [n, 4].
        mirrored: whether each image is mirrored, bool [n].
    """
    grids = []
    for side in range(2):
        start = boxes[:, side]
        length = boxes[:, 2 + side]
        size = images.shape[2 + side]
        centres = (
            torch.arange(size, device=images.device, dtype=images.dtype) + 0.5
        ) / size
        coordinates = centres * length[:, None] - 0.5
        coordinates = start[:, None] + torch.minimum(
            coordinates.clamp(min=0), length[:, None] - 1.0
        )
        if side == 1:
            coordinates = torch.where(
                mirrored[:, None], coordinates.flip(1), coordinates
            )
        grids.append(2 * coordinates / max(size - 1, 1) - 1)
    rows, columns = grids
    column_index = columns[:, None].expand(-1, rows.shape[1], -1)
    row_index = rows[..., None].expand(-1, -1, columns.shape[1])
    grid = torch.stack([column_index, row_index], -1)
    return grid_sample(
        images, grid.to(images.dtype), align_corners=True, padding_mode="border"
    )


def grey(x: Tensor) -> Tensor:
    """Return the luminance [n, 1, H, W] of images of three channels; of other images the mean over their channels."""
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    weights = x.new_tensor(GREY).view(3, 1, 1)
    return (x * weights).sum(1, keepdim=True)


def _rotate_hue(x: Tensor, by: Tensor) -> Tensor:
    """Rotate the images' hue by a part of its circle, with fixed saturation and value.

    The model of colours is the hexagonal cone (Smith 1978).

    Args:
        x: colour images [n, 3, H, W].
        by: the part of the circle for each image, [n, 1, 1, 1]; 1 is the whole circle.
    """
    value, _ = x.max(1, keepdim=True)
    span = value - x.min(1, keepdim=True).values
    nonzero_span = span.where(span > 0, 1.0)
    r, g, b = x.split(1, 1)
    hue = torch.where(
        value == r,
        ((g - b) / nonzero_span) % 6,
        torch.where(value == g, (b - r) / nonzero_span + 2, (r - g) / nonzero_span + 4),
    )
    rotated_hue = hue + 6 * by
    # a channel falls from the value by the span, along a trapezium over the circle of six sectors
    offsets = x.new_tensor([5.0, 3.0, 1.0]).view(3, 1, 1)
    k = (rotated_hue + offsets) % 6
    return value - span * torch.minimum(k, 4 - k).clamp(0, 1)
