"""The three networks as nested `nn.Sequential`. The names of the children become node names in the ONNX files."""

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn

CLASSES = 10


def convolutional() -> nn.Module:
    """Return two 5x5 convolutions with batch normalization and pooling, and two fully connected layers."""
    return _named(
        conv1=nn.Conv2d(1, 32, 5, padding=2, bias=False),
        bn1=nn.BatchNorm2d(32),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(32, 64, 5, padding=2, bias=False),
        bn2=nn.BatchNorm2d(64),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(64 * 7 * 7, 128),
        relu3=nn.ReLU(),
        fc2=nn.Linear(128, CLASSES),
    )


def mobile() -> nn.Module:
    """Return a small MobileNetV3 (Howard et al., 2019): 14x14 after the stem, 7x7 from the second block on."""
    return _named(
        stem=_conv_norm(1, 32, 3, stride=2, act=nn.Hardswish()),
        block1=Residual(_inverted_residual(32, 96, 32, 3, act=nn.ReLU())),
        block2=_inverted_residual(32, 128, 48, 5, stride=2),
        block3=Residual(_inverted_residual(48, 128, 48, 5)),
        block4=_inverted_residual(48, 128, 64, 3),
        block5=Residual(_inverted_residual(64, 128, 64, 5)),
        head=_conv_norm(64, 128, 1, act=nn.Hardswish()),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(128, CLASSES),
    )


def transformer() -> nn.Module:
    """Return a small vision transformer (Dosovitskiy et al., 2021): 49 patches of 4x4 pixels, mean pooling."""
    width, heads, layers = 96, 4, 4

    def layer() -> nn.Module:
        attention = _named(norm=nn.LayerNorm(width), self=Attention(width, heads))
        mlp = _named(
            norm=nn.LayerNorm(width),
            fc1=TokenLinear(width, 4 * width),
            gelu=nn.GELU(),
            fc2=TokenLinear(4 * width, width),
        )
        return _named(attention=Residual(attention), mlp=Residual(mlp))

    return _named(
        patches=nn.Conv2d(1, width, 4, stride=4),
        tokens=Tokens(),
        positions=Positions(49, width),
        **{f"layer{number}": layer() for number in range(1, layers + 1)},
        norm=nn.LayerNorm(width),
        pool=TokenMean(),
        fc=nn.Linear(width, CLASSES),
    )


class Residual(nn.Module):
    """x + body(x)."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """Return x + body(x), in the shape of `x`."""
        return torch.add(x, self.body(x))


class SqueezeExcite(nn.Module):
    """x * gate(x): a factor in 0..1 for each channel, computed from the mean of every channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = channels // 4
        self.gate = _named(
            pool=nn.AdaptiveAvgPool2d(1),
            reduce=nn.Conv2d(channels, squeezed, 1),
            relu=nn.ReLU(),
            expand=nn.Conv2d(squeezed, channels, 1),
            hardsigmoid=nn.Hardsigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Scale the channels of `x` (N, C, H, W)."""
        return torch.mul(x, self.gate(x))


class Tokens(nn.Module):
    """(N, C, H, W) to (N, H * W, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return one token for each position."""
        return x.flatten(2).transpose(1, 2)


class Positions(nn.Module):
    """Add a learned vector to each token."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(1, tokens, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Add the embedding (1, T, C) to `x` (N, T, C)."""
        return x + self.embedding


class TokenLinear(nn.Linear):
    """A linear layer on (N, T, C). In ONNX it is a MatMul and an Add, because Gemm takes only matrices."""


class Attention(nn.Module):
    """Scaled dot-product self-attention (Vaswani et al., 2017): softmax(q k^T / sqrt(C / heads)) v, projected."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.depth = heads, width // heads
        self.query, self.key, self.value, self.project = (TokenLinear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens of `x` (N, T, C)."""
        q, k, v = (self._split(linear(x)) for linear in (self.query, self.key, self.value))
        weights = (q @ k.transpose(2, 3) / math.sqrt(self.depth)).softmax(dim=-1)
        mixed: Tensor = self.project((weights @ v).transpose(1, 2).flatten(2))
        return mixed

    def _split(self, x: Tensor) -> Tensor:
        """(N, T, C) to (N, heads, T, C / heads)."""
        return x.reshape(*x.shape[:2], self.heads, self.depth).transpose(1, 2)


class TokenMean(nn.Module):
    """(N, T, C) to (N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Average over the tokens."""
        return x.mean(dim=1)


def _named(**children: nn.Module) -> nn.Sequential:
    """Chain modules under the given names."""
    return nn.Sequential(OrderedDict(children))


def _conv_norm(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1, act: nn.Module | None = None
) -> nn.Sequential:
    """Return a convolution that keeps H and W (at stride 1), a batch normalization, and the activation `act` if any."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    activation = {} if act is None else {"act": act}
    return _named(conv=conv, bn=nn.BatchNorm2d(outputs, eps=1e-3), **activation)


def _inverted_residual(
    inputs: int, expanded: int, outputs: int, kernel: int, *, stride: int = 1, act: nn.Module | None = None
) -> nn.Sequential:
    """Return expand 1x1, depthwise, squeeze-and-excite, project 1x1; the default of `act` is hard-swish."""
    act = act or nn.Hardswish()
    return _named(
        expand=_conv_norm(inputs, expanded, 1, act=act),
        depthwise=_conv_norm(expanded, expanded, kernel, stride=stride, groups=expanded, act=act),
        excite=SqueezeExcite(expanded),
        project=_conv_norm(expanded, outputs, 1),
    )
