//! Requests of strangers: the HTTP of the metrics, and what the daemon, which may be somebody
//! else's by now, asks of its broker.
//!
//! Input: bytes, which are read as both.

use nightporterd::broker::asked_uplink;
use nightporterd::control::is_metrics_request;

use crate::noise;

/// Judges one input.
pub fn run(data: &[u8]) {
    match is_metrics_request(data) {
        Ok(_) => {
            assert!(data.starts_with(b"GET /metrics"), "it asks for the metrics");
            let next = data.get(12);
            assert!(next.is_none_or(|next| b" \r".contains(next)), "and for nothing else");
        }
        Err(response) => {
            let text = String::from_utf8(response).expect("text");
            assert!(text.starts_with("HTTP/1.1 4") && text.contains("\r\n\r\n"), "{text}");
            assert!(text.len() < 512, "no part of a request comes back");
        }
    }
    if let Some(uplink) = asked_uplink(data) {
        for name in [Some(&uplink.ifname), uplink.bridge.as_ref()].into_iter().flatten() {
            assert!((1..16).contains(&name.len()), "an interface's name: {name:?}");
            let is_bad = |c: char| "/:%".contains(c) || c.is_whitespace() || c.is_control();
            assert!(!name.contains(is_bad), "{name:?}");
            assert!(name != "." && name != "..", "{name:?}");
        }
    }
}

/// Of each some.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let http: [&[u8]; 5] = [
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\n\r\n",
        b"GET /metrics\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text;q=0.5,*/*;q=1\r\n\r\n",
    ];
    let mut uplink = [0; 35];
    uplink[..3].copy_from_slice(&[1, 0, 1]);
    uplink[3..6].copy_from_slice(b"np0");
    uplink[19..22].copy_from_slice(b"br0");
    let mut without_bridge = uplink;
    without_bridge[19..22].fill(0);
    let uplinks = [&uplink[..], &without_bridge[..]];
    http.into_iter().chain(uplinks).map(<[u8]>::to_vec).chain([noise(5, 35)]).collect()
}
