"""Measure this engine on one workload, as `nanoengine bench` does: nanoengine/apps/bench.py says how.

python bench.py                                # Qwen3-0.6B's shape with random weights: no download
python bench.py --workload decode --repeats 5
python bench.py --model Qwen/Qwen3-0.6B        # a checkpoint
"""

from nanoengine.apps.bench import main

if __name__ == "__main__":
    main()
