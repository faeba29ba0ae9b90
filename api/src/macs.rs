//! The switch's table of MACs, as the daemon tells of it.

use serde::{Deserialize, Serialize};

/// Some MACs.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct MacPage {
    /// At most 500, and perhaps none though there are more.
    pub macs: Vec<MacInfo>,
    /// Where to go on, if there may be more.
    pub next: Option<MacCursor>,
}

/// A place in the table: the number of a network, and a key in its switch. The default is the
/// beginning.
pub type MacCursor = (u16, Option<u64>);

/// A MAC, and the port behind which it is.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct MacInfo {
    /// The MAC.
    pub mac: String,
    /// The VLAN by its outer tag, 0 without one; `None`: on every VLAN.
    pub vlan: Option<u16>,
    /// That tag is a service provider's (802.1ad).
    pub is_service: bool,
    /// The name of the port.
    pub port: String,
    /// `guest`: it is that VM's own; `registry`: the registry has it; `heard`: in a frame.
    pub known: String,
    /// Seconds since it was heard last.
    pub age_s: Option<u64>,
}
