//! Who is asked about a frame on its way out.

use super::history::{History, Side};
use super::out::Out;
use super::{
    Ensure, duplicates, field_by_field, inv01, inv02, inv04, inv05, inv07, inv08, inv09, inv10,
    inv11, inv12, inv13, inv14, inv15, inv16, inv17, inv18, inv19, inv21, inv23, inv24, inv25,
    quality, rule,
};

/// Asks every checker that looks at frames on their way out.
pub(crate) fn check_out(h: &History, o: &Out<'_>, gone: bool) -> Result<(), (u8, String)> {
    inv19::on_out(h, o, gone).map_err(|what| (19, what))?;
    // Nobody speaks for a guest that means harm, and to a remote that does anything may be said.
    if h.opaque || h.hostile[Side::G as usize] || h.hostile[o.to as usize] {
        return Ok(());
    }
    let for_all: [(u8, Ensure); 8] = [
        (11, inv11::on_out(h, o)),
        (4, inv04::on_out(h, o)),
        (25, inv25::on_out(h, o)),
        (12, inv12::on_out(h, o)),
        (7, inv07::on_out(h, o)),
        (10, inv10::on_out(h, o)),
        (13, inv13::on_out(h, o)),
        (15, inv15::on_out(h, o)),
    ];
    first_wrong(&for_all)?;
    if h.hostile[Side::R as usize] {
        field_by_field::foreign_to_guest(h, o).map_err(|what| (rule::FIELDS, what))?;
        return duplicates::on_out(h, o).map_err(|what| (rule::DUPLICATES, what));
    }
    let between_honest: [(u8, Ensure); 11] = [
        (24, inv24::on_out(h, o)),
        (8, inv08::on_out(h, o)),
        (17, inv17::on_out(h, o)),
        (23, inv23::on_out(h, o)),
        (5, inv05::on_out(h, o)),
        (1, inv01::on_out(h, o)),
        (2, inv02::on_out(h, o)),
        (9, inv09::on_out(h, o)),
        (14, inv14::on_out(h, o)),
        (16, inv16::on_out(h, o)),
        (21, inv21::on_out(h, o)),
    ];
    first_wrong(&between_honest)?;
    quality::on_out(h, o)?;
    inv18::on_out(h, o).map_err(|what| (18, what))
}

pub(super) fn first_wrong(checks: &[(u8, Ensure)]) -> Result<(), (u8, String)> {
    let wrong = checks.iter().find_map(|(n, check)| check.clone().err().map(|what| (*n, what)));
    wrong.map_or(Ok(()), Err)
}
