//! See `nightporter_fuzz_targets::sealed`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nightporter_fuzz_targets::sealed::run(data));
