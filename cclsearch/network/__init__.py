"""Networks of a cluster, measured or simulated: links, collectives, what groups of ranks get, and steps on them."""
