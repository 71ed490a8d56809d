"""What other packages import from here."""

from weightsmith._models.lora.adapter import Adapter as Adapter
from weightsmith._models.lora.apply import Names as Names
from weightsmith._models.lora.apply import apply_adapter as apply_adapter
from weightsmith._models.lora.apply import find_places as find_places
from weightsmith._models.lora.opening import open_adapter as open_adapter
from weightsmith._models.lora.opening import with_inner_adapter as with_inner_adapter
