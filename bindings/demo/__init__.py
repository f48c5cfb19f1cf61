"""The demo: a small vision-language model trained on real photographs, as loaded and balanced.

```
data.py     photographs and text that installed packages ship -> samples -> an ordinary DataLoader
model.py    a packed vision encoder and a small decoder language model
measure.py  CPU seconds of each part of a step; critical path, allowed speed-up, what differs
run.py      N local ranks train twice from the same seed and the same data
report.py   one table, one JSON object, one verdict
picture.py  ranks against time, before above after
```
"""
