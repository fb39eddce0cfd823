"""Ask a model a few questions, as `nanoengine run` does: nanoengine/apps/ask.py is what there is to read.

python example.py                     # the bundled model: no download
python example.py --model Qwen/Qwen3-0.6B --prompt "introduce yourself"
python example.py --trace run.html    # a page that shows the run step by step
"""

from nanoengine.apps.ask import run

if __name__ == "__main__":
    run()
