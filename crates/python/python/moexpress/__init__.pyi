from . import errors as errors
from ._communicator import Combined as Combined
from ._communicator import Communicator as Communicator
from ._communicator import LowReceived as LowReceived
from ._communicator import Received as Received
from ._meeting import Meeting as Meeting
from .errors import Error as Error

__version__: str

def cuda_available() -> bool: ...
