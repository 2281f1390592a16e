"""Why a unit stays float: every reason that the rules, the costs and plan files give. `about` fills in the figures."""

from __future__ import annotations

from ...transforms.int8.reasons import Reason

# the user or the data decide
EXCLUDED = Reason("excluded", "{}")
KEPT_FLOAT = Reason("kept-float", "{}")
PLAN_FILE = Reason("plan-file", "{} says so")
NO_RANGES = Reason("no-ranges", "no ranges without data")
ZERO_INPUT = Reason("zero-input", "its input is zero in all the data, which gives no scale")  # nor one for the bias
DIVISOR = Reason(
    "divisor", "an operator divides by its result or takes its logarithm, and uint8 would round small values to 0"
)
LOGARITHM = Reason(
    "logarithm", "a logarithm of a sum whose input reaches {:.0f} times its constant is too steep for uint8"
)
RANGES_DIFFER = Reason("ranges-differ", "the ranges that meet in its unit differ {:.0f}-fold")
CONSTANT_SPREAD = Reason(
    "constant-spread", "one scale would round its constant too much: the largest value is {:.0f} times the median one"
)
NOT_WRITTEN = Reason("not-written", "{}")  # of a unit that is in integers in an INT8 model that is not written

# limits of the runtime and of the model's opset
FOREIGN = Reason("foreign-domain", "an operator of domain {}")
OLD_SCAN = Reason("old-scan", "operators in a Scan of opset 8 stay float")
OLD_OPSET = Reason("old-opset", "opset {} has no integer operators, and the model cannot be converted")
NOT_INSTALLED = Reason("not-installed", "the installed runtime has no {}")
UNSIGNED_ONLY = Reason("unsigned-only", "{} takes unsigned activations only")
ABSORBED = Reason("absorbed", "another operator's kernel computes it, in float and in int8")
NOT_PORTABLE = Reason("not-portable", "only ONNX Runtime has {}")
FUSED_ELSEWHERE = Reason("fused-elsewhere", "other runtimes fuse it into the product before it")
NO_FORM = Reason("no-form", "the operator does not have this form")

# tensors and weights
NOT_FLOAT32 = Reason("not-float32", "its tensors are not float32")
WEIGHTS_NOT_FLOAT32 = Reason("weights-not-float32", "its weights are not float32")
WEIGHTS_NOT_CONSTANT = Reason("weights-not-constant", "its weights are not constants of float32")
WEIGHTS_NOT_FINITE = Reason("weights-not-finite", "its weights are not finite")
WEIGHTS_EMPTY = Reason("weights-empty", "its weights are empty")
WEIGHTS_COMPUTED = Reason("weights-computed", "computed weights")
WEIGHTS_RANK = Reason("weights-rank", "weights of rank {}")
WEIGHTS_VECTOR = Reason("weights-vector", "weights of one dimension")
HALF_BYTE = Reason("half-byte", "rows of an odd number of 4-bit weights")
WEIGHTS_SMALL = Reason("weights-small", "its weights are too few for a gain")
WRITTEN = Reason("written", "requant wrote this model")
CACHE = Reason("cache", "it turns a cache in bytes into floats, or back")
BIAS_COMPUTED = Reason("bias-computed", "a computed bias")
BIAS_NOT_FINITE = Reason("bias-not-finite", "its bias is not finite")
BIAS_SHAPE = Reason("bias-shape", "its bias is not one value per column")
BIAS_MISSING = Reason("bias-missing", "it has no constant bias")
BOTH_ACTIVATIONS = Reason("both-activations", "both factors are activations, a small share of the work")
OPERAND_CONSTANT = Reason("operand-constant", "a constant operand")
OPERAND_NOT_FLOAT32 = Reason("operand-not-float32", "a constant operand that is not float32")
OPERAND_NOT_FINITE = Reason("operand-not-finite", "a constant operand that is not finite")

# attributes
TRANSPOSED = Reason("transposed", "a transposed activation")
ALPHA_BETA = Reason("alpha-beta", "alpha or beta is not 1")
ATTENTION = Reason("attention", "QAttention does not support its inputs or attributes")
ATTENTION_FORM = Reason("attention-form", "native attention has no {}")
BATCH_FIRST = Reason("batch-first", "its layout is batch first")
OTHER_ACTIVATIONS = Reason("other-activations", "its state is clipped, or has other functions than sigmoid and tanh")
PEEPHOLES = Reason("peepholes", "its gates read its cell, or depend on each other")
NOT_ROWS = Reason("not-rows", "it does not gather rows")
DILATED_POOL = Reason("dilated-pool", "QLinearAveragePool has no dilations")
CUT_WINDOW = Reason("cut-window", "the integer kernel counts other padding where the last window is cut off")
SIGNED_GATE = Reason("signed-gate", "the lookup of a HardSigmoid needs unsigned activations")
UNUSUAL_GATE = Reason("unusual-gate", "{}")
SEVERAL_OUTPUTS = Reason("several-outputs", "several outputs")
PAD_FORM = Reason("pad-form", "Pad has no uint8 form before opset 13, or with a computed value")
PAD_VALUE = Reason("pad-value", "it pads with another value than zero")

# int8 would cost more than it gains
FEW_PRODUCTS = Reason("few-products", "{} products per output are too few for the integer kernel")
SMALL_STATE = Reason("small-state", "a state of {} is too small for the integer kernel")
FLOAT_INPUTS = Reason("float-inputs", "its inputs come in float")
FLOAT_READERS = Reason("float-readers", "nothing after it computes in integers")
NOTHING_COMPUTES = Reason("nothing-computes", "nothing computes in integers")
FLOAT_FASTER = Reason("float-faster", "float takes {:.0f} us here, int8 {:.0f} us")
FLOAT_ABSORBED = Reason("float-absorbed", "another operator's kernel computes it in float, int8 takes {:.0f} us here")
NOISE_COSTS_MORE = Reason("noise-costs-more", "int8 saves {:.0f} us here, less than its noise is worth")
NOISE_AROUND_COSTS_MORE = Reason(  # of a unit that moves or selects values, and adds no noise itself
    "noise-costs-more", "int8 saves {:.0f} us here, less than the noise of uint8 tensors around it is worth"
)
SLOWER_IN_BODY = Reason("slower-in-body", "the model is slower here with int8 in the bodies of its control flow")
CONVERSIONS_COST_MORE = Reason("conversions-cost-more", "int8 saves {:.0f} us here, its conversions take {:.0f} us")
NEIGHBOURS_COST_MORE = Reason(
    "neighbours-cost-more", "int8 saves {:.0f} us here, less than it costs the units around it"
)
TOO_NOISY = Reason("too-noisy", "its tensors carry too much of the noise")
