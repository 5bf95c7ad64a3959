"""Access to the engines: routes, connections, streams of answers and faulty replicas."""
