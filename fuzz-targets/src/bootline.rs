//! The kernel command line that a lab guest reads.

use nightporter_guest::bootline::{Bootline, Mac, Neighbour, Nic};

/// Judges one input: a line that parses means the same when it is written again.
pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match text.parse::<Bootline>() {
        // A port's name could hold anything but white space, and this is all that is written.
        Ok(line) => assert_eq!(line.to_string().parse::<Bootline>().expect("our own words"), line),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// A line as the lab writes it.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let mac = |last| Mac([0x52, 0x54, 0, 0, 1, last]);
    let (address, prefix) = ([10, 77, 1, 11].into(), 24);
    let line = Bootline {
        control: "ttyS1".to_owned(),
        nics: (1..3).map(|n| Nic { mac: mac(n), address, prefix }).collect(),
        neighbours: vec![Neighbour { address, mac: mac(9) }],
    };
    vec![format!("console=ttyS0 quiet {line} panic=1").into_bytes()]
}
