"""`pdserve up --ray`: instances on the nodes of a Ray cluster. Only session.py and actor.py import ray, on use.

driver   `pdserve up`: scheduler, global table, a RemoteChild for each instance    (remote_child, placements, session)
node     an actor for each instance: its files, its process, its log               (actor, host)
"""
