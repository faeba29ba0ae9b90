//! INV-04, no early FIN or SYN ACK: R's FIN is acknowledged only once G has acknowledged it, and
//! R's SYN only by G.

use super::Ensure;
use crate::history::{BASE, History, Side};
use crate::out::Out;

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let Some(ack) = o.ack.filter(|_| o.to == Side::R && !o.tcp.flags.rst()) else { return Ok(()) };
    let (r, g) = (h.end(Side::R), h.end(Side::G));
    if r.fin.is_some_and(|fin| ack > fin && g.acked <= fin) && o.gated {
        return Err("FIN acknowledged before G did".to_owned());
    }
    if ack > BASE && o.gated && g.acked <= BASE {
        return Err("SYN acknowledged before G did".to_owned());
    }
    Ok(())
}
