"""The process_group transport: payload through a two-rank group of gloo, nccl or hccl, made anew for every link.

transport.py   what the table of transports sees; no file before it imports torch
devices.py     one issuing thread per device, and the turn to make a link
group_setup.py      both ends make their group at once: terms, turn, creation, proof
exchange.py    what they say meanwhile, on the link's own stream; store.py shows it to c10d as a Store
group.py       one group's operations, their deadlines, and how it is given up
link_ends.py        outlet and inlet; payload.py is all that touches pool bytes

gloo, nccl and hccl, and their rules: devices/collectives.py
"""
