"""What runs once per node: who am I -> join -> start the ranks -> watch them -> one verdict. Never imports the other rooms.

Only `__main__` reads the config; every other module takes plain arguments.
"""
