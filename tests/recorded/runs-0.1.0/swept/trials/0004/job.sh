# nothing runs: the recorded row of tp=4 pp=1 dp=128 zero_stage=1 micro_batch_size=2 is read (The Ultra-Scale Playbook, benchmark figure (Hugging Face nanotron team))
