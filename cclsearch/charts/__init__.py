"""Charts: plain data in, Vega-Lite specifications out; drawn by Vega in pages and by vl-convert as SVG and PNG."""
