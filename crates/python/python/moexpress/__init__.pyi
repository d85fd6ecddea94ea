from . import errors as errors
from ._communicator import Communicator as Communicator
from ._early import Early as Early
from ._early import Ready as Ready
from ._meeting import Meeting as Meeting
from ._results import ByExpert as ByExpert
from ._results import Combined as Combined
from ._results import LowReceived as LowReceived
from ._results import Received as Received
from .errors import Error as Error

__version__: str

def cuda_available() -> bool: ...
