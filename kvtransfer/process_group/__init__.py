"""The process_group transport: payload through a two-rank group of gloo, nccl or hccl, made anew for every link.

transport.py   the transport as registered in transport_table.py; imports torch only on use
devices.py     one issuing thread per device, and the turn to make a group on it
group_setup.py both ends make their group at the same time: terms, turn, creation, proof
exchange.py    the set-up messages on the link's own stream; store.py makes them a c10d Store
group.py       one group's operations, their deadlines, and how it is freed or abandoned
link_ends.py   outlet and inlet; only payload.py accesses pool bytes

gloo, nccl and hccl, and their rules: devices/collectives.py
"""
