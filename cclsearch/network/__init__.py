"""Networks of a cluster, measured or simulated: links, collectives, rates of groups of ranks, and steps on them."""
