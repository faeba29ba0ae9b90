//! See `nightporter_fuzz_targets::probes`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nightporter_fuzz_targets::probes::run(data));
