"""The streams meet a training run: processes, commands, and later other people's trainers.

command line   cli.py        evenload demo
  -> ranks     launch.py     local processes joined by gloo, for the demo, tests and benchmarks
  -> loaders   your batches with tickets in them
  -> hf.py     a Hugging Face model takes them as they are;  encoder.py: any encoder inside a model's forward
  -> training  an encoder, a language model, one step after the other
"""

if __name__ != "evenload.bindings":
    msg = f"this folder is imported as evenload.bindings, found {__name__}: its own name would hide other packages"
    raise ImportError(msg)
