from .ctranslate2 import CTranslate2Model as CTranslate2Model
from .exporter import export_model as export_model
from .exporter import prove as prove
from .int8 import to_int8 as to_int8
from .marian import to_marian as to_marian
from .marian import from_marian as from_marian
from .onnx import OnnxModel as OnnxModel
