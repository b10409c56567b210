"""Views of images: each operation against torchvision's, image by image, and the draws against their distributions."""

import torch

from fl_core import seeds
from fl_core.data import augment
from fl_core.data.augment import MoCoViews
from tests.conftest import refuses


def reference():
    """Return torchvision's views, which collecting the tests need not import."""
    from torchvision.transforms.v2 import functional

    return functional


def draw(seed=0):
    return seeds.torch_generator(seed, "views")


def images(n=8, shape=(3, 9, 12), seed=1):
    return torch.rand(
        n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


OPERATIONS = {
    "brightness": (0, lambda x, s: reference().adjust_brightness(x, 1 + s)),
    "contrast": (1, lambda x, s: reference().adjust_contrast(x, 1 + s)),
    "saturation": (2, lambda x, s: reference().adjust_saturation(x, 1 + s)),
    "hue": (3, lambda x, s: reference().adjust_hue(x, s)),
}


def test_a_view_is_composed_as_mocos():
    """All draws are taken again in the same order, and applied one image after another by torchvision."""
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    x = images(16)
    normalised = reference().normalize(x, list(mean), list(std))
    views = MoCoViews(mean, std)(normalised, draw(3))
    again = draw(3)
    boxes = augment.crop_boxes(16, 9, 12, again)
    grey = torch.rand(16, generator=again) < 0.2
    strengths = 0.4 * (2 * torch.rand(16, 4, generator=again) - 1)
    order = torch.rand(16, 4, generator=again).argsort(1)
    mirrored = torch.rand(16, generator=again) < 0.5
    assert 0 < int(grey.sum()) < 16
    assert 0 < int(mirrored.sum()) < 16
    for k, image in enumerate(x):
        view = reference().resized_crop(
            image, *boxes[k].tolist(), size=[9, 12], antialias=True
        )
        view = reference().rgb_to_grayscale(view, 3) if grey[k] else view
        for operation in order[k].tolist():
            view = list(OPERATIONS.values())[operation][1](
                view, float(strengths[k, operation])
            )
        view = reference().horizontal_flip(view) if mirrored[k] else view
        view = reference().normalize(view, list(mean), list(std))
        torch.testing.assert_close(views[k], view, rtol=0, atol=5e-5)


def test_tables_have_no_views():
    with refuses(r"got.*\(4, 10\)"):
        MoCoViews()(torch.zeros(4, 10), draw())
