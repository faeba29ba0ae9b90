//! See `nightporter_fuzz_targets::claims`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nightporter_fuzz_targets::claims::run(data));
