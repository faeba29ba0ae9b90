//! See `nightporter_fuzz_targets::images`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nightporter_fuzz_targets::images::run(data));
