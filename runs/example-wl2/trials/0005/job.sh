# nothing runs: the recorded row of tp=4 pp=1 dp=4 zero_stage=0 micro_batch_size=2 is read (The Ultra-Scale Playbook, benchmark figure (Hugging Face nanotron team))
