"""Flip and color augmentation: parameters drawn per view on the host, applied to the whole batch on the device.

No library does this for a batch with given parameters per image: torchvision takes one factor for all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from ssl_vit.data import AugmentConfig
from ssl_vit.interfaces import Batch, UserError

_GRAY = (0.2989, 0.587, 0.114)  # torchvision's weights of red, green and blue
_BLUR_RADIUS = 3  # a kernel of 7 pixels, and its standard deviations, as in LeJEPA's minimal example
_BLUR_SIGMA = (0.1, 2.0)
_SOLARIZE = 128


class ColorAugment:
    """Draws the parameters of `device_images` for one view.

    columns: how many there are. 3: factors of brightness, contrast and saturation. 6: also the shift of the hue (share
    of the color circle), the standard deviation of the blur (pixels; 0: none) and the value from which on pixels are
    inverted (256: none).
    """

    def __init__(self, augment: AugmentConfig) -> None:
        self.augment = augment
        self.spread = torch.tensor([augment.brightness, augment.contrast, augment.saturation])
        more = augment.hue or augment.grayscale or augment.blur or augment.solarize or augment.jitter_prob < 1
        self.columns = 6 if more else 3

    def draw(self) -> torch.Tensor:
        """float32 (columns,), from torch's default CPU generator."""
        factors = 1 + (2 * torch.rand(3) - 1) * self.spread
        if self.columns == 3:
            return factors
        augment, (low, high) = self.augment, _BLUR_SIGMA
        hue, sigma, jitter, gray, blur, solarize = torch.rand(6).tolist()
        changed = [*factors.tolist(), (2 * hue - 1) * augment.hue]
        if jitter >= augment.jitter_prob:
            changed = [1.0, 1.0, 1.0, 0.0]
        if gray < augment.grayscale:
            changed[2] = 0.0
        changed.append(low + (high - low) * sigma if blur < augment.blur else 0.0)
        changed.append(_SOLARIZE if solarize < augment.solarize else 256.0)
        return torch.tensor(changed)


def color_augment(augment: AugmentConfig) -> ColorAugment | None:
    """None where the settings change no color."""
    strengths = (augment.brightness, augment.contrast, augment.saturation, augment.hue)
    return ColorAugment(augment) if any((*strengths, augment.grayscale, augment.blur, augment.solarize)) else None


def device_images(batch: Batch) -> torch.Tensor:
    """The batch's images as the model sees them before normalization: uint8 (B, C, H, W), mirrored and with changed
    colors where the batch says so. Element-wise work, shifts and one mean per image, so that a compiler fuses it; the
    host waits for nothing."""
    images = torch.where(batch.flip[:, None, None, None], batch.images.flip(-1), batch.images)
    if batch.jitter is None:
        return images
    rgba = images.shape[1] == 4
    images, alpha = (images[:, :3], images[:, 3:]) if rgba else (images, images)  # alpha is not a color channel
    brightness, contrast, saturation, *more = batch.jitter[:, :, None, None, None].unbind(1)
    pixels = _jittered(images, brightness, contrast, saturation)
    if more:
        hue, sigma, threshold = more
        pixels = _blurred(_hue_shifted(pixels, hue) if images.shape[1] == 3 else pixels, sigma.flatten(1))
        pixels = torch.where(pixels >= threshold, 255 - pixels, pixels)
    pixels = pixels.round().to(torch.uint8)
    return torch.cat([pixels, alpha], dim=1) if rgba else pixels


def _jittered(
    images_BCHW: torch.Tensor, brightness: torch.Tensor, contrast: torch.Tensor, saturation: torch.Tensor
) -> torch.Tensor:
    """Brightness, then contrast, then saturation by the given factors (B, 1, 1, 1), as torchvision's functions of these
    names define them, but float32 in 0..255: rounded once, at the end. Gray images have no saturation."""
    pixels = (images_BCHW.float() * brightness).clamp(0, 255)
    pixels = (pixels * contrast + _gray(pixels).mean((1, 2, 3), keepdim=True) * (1 - contrast)).clamp(0, 255)
    if images_BCHW.shape[1] == 3:
        pixels = pixels * saturation + _gray(pixels) * (1 - saturation)
    return pixels.clamp(0, 255)


def _gray(pixels_BCHW: torch.Tensor) -> torch.Tensor:
    if pixels_BCHW.shape[1] != 3:
        return pixels_BCHW
    # Numbers, no tensor of them: that would be copied to the device, and the host would wait for it.
    red, green, blue = (weight * channel for weight, channel in zip(_GRAY, pixels_BCHW.split(1, dim=1), strict=True))
    return red + green + blue


def _hue_shifted(pixels_BCHW: torch.Tensor, shift_B111: torch.Tensor) -> torch.Tensor:
    """RGB with the hue of HSV shifted by a share of the circle, as torchvision's `adjust_hue`."""
    red, green, blue = pixels_BCHW.split(1, dim=1)
    high, low = pixels_BCHW.amax(1, keepdim=True), pixels_BCHW.amin(1, keepdim=True)
    chroma = high - low
    divisor = chroma.clamp(min=1e-6)  # without chroma, the hue has no effect
    sixths = torch.where(
        high == red,
        (green - blue) / divisor,
        torch.where(high == green, (blue - red) / divisor + 2, (red - green) / divisor + 4),
    )
    # A channel falls from the highest to the lowest value with the distance of the hue from its own.
    turned = [(sixths + 6 * shift_B111 + place).remainder(6) for place in (5, 3, 1)]
    return torch.cat([high - chroma * torch.minimum(k, 4 - k).clamp(0, 1) for k in turned], dim=1)


def _blurred(pixels_BCHW: torch.Tensor, sigma_B1: torch.Tensor) -> torch.Tensor:
    """Gaussian blur, as torchvision's `gaussian_blur` with reflected borders; exactly the input where sigma is 0."""
    r = _BLUR_RADIUS
    if min(pixels_BCHW.shape[2:]) <= r:
        raise UserError(f"data.augment.blur needs images of at least {r + 1}x{r + 1} pixels")
    offsets_K = torch.arange(-r, r + 1, device=pixels_BCHW.device)
    weights_BK = (-0.5 * (offsets_K / sigma_B1.clamp(min=1e-2)).square()).softmax(1)
    for axis, padding in ((2, (0, 0, r, r)), (3, (r, r, 0, 0))):
        size, padded = pixels_BCHW.shape[axis], F.pad(pixels_BCHW, padding, mode="reflect")
        shifted = (weights_BK[:, k, None, None, None] * padded.narrow(axis, k, size) for k in range(2 * r + 1))
        pixels_BCHW = sum(shifted, torch.zeros_like(pixels_BCHW))
    return pixels_BCHW
