from . import errors as errors
from ._communicator import Communicator as Communicator
from ._meeting import Meeting as Meeting
from ._results import ByExpert as ByExpert
from ._results import Combined as Combined
from ._results import LowReceived as LowReceived
from ._results import Received as Received
from .errors import Error as Error

__version__: str

def cuda_available() -> bool: ...
