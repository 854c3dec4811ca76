from .doctor import CHECKS as CHECKS
from .doctor import diagnosis_of_machine as diagnosis_of_machine
from .doctor import look_at_machine as look_at_machine
from .program import main as main
