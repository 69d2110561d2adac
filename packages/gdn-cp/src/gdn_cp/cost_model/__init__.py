"""How long an exchange takes, by a model of the link, and which schedule that speaks for.

python -m gdn_cp.cost_model                                  # the table, for assumed links
torchrun --nproc-per-node 2 -m gdn_cp.cost_model             # the table, for the link between these ranks
"""

from gdn_cp.cost_model.measure import MapTimes, measure_link, measure_maps
from gdn_cp.cost_model.model import (
    ETHERNET,
    INFINIBAND,
    LINKS,
    NVLINK,
    SCHEDULES,
    Choice,
    Link,
    as_link,
    chain_blocks,
    choose_schedule,
    message_bytes,
    predict,
    resolve_schedule,
)

__all__ = [
    "ETHERNET",
    "INFINIBAND",
    "LINKS",
    "NVLINK",
    "SCHEDULES",
    "Choice",
    "Link",
    "MapTimes",
    "as_link",
    "chain_blocks",
    "choose_schedule",
    "measure_link",
    "measure_maps",
    "message_bytes",
    "predict",
    "resolve_schedule",
]
