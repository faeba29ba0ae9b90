//! `nightporter macs`: the switch's table.

use std::io::{self, Write};

use anyhow::Result;
use nightporter_api::{MacInfo, Reply, Request};

use crate::client::Client;
use crate::{print, show, unexpected};

/// Shows the MACs of all ports, or of one.
pub(crate) fn show(client: &mut Client, json: bool, port: Option<&str>) -> Result<()> {
    let (mut all, mut from) = (Vec::new(), Default::default());
    loop {
        match client.ask(&Request::Macs { port: port.map(String::from), from })? {
            Reply::Macs(page) => {
                all.extend(page.macs);
                match page.next {
                    Some(next) => from = next,
                    None => break,
                }
            }
            other => return unexpected(&other),
        }
    }
    all.sort_by(|a, b| (&a.mac, a.vlan, &a.port).cmp(&(&b.mac, b.vlan, &b.port)));
    print(json, &all, |out| table(out, &all))
}

fn table(out: &mut dyn Write, macs: &[MacInfo]) -> io::Result<()> {
    let mut rows = vec![["MAC", "VLAN", "PORT", "KNOWN", "AGE"].map(String::from)];
    rows.extend(macs.iter().map(|it| {
        let vlan = match (it.vlan, it.is_service) {
            (None, _) => "all".into(),
            (Some(0), _) => "-".into(),
            (Some(vlan), false) => vlan.to_string(),
            (Some(vlan), true) => format!("{vlan} (802.1ad)"),
        };
        let age = it.age_s.map_or("-".into(), show::duration);
        [it.mac.clone(), vlan, show::shortened(&it.port), it.known.clone(), age]
    }));
    show::table(out, &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mac_has_its_vlan_its_port_and_how_it_is_known() {
        let mac = |mac: &str, vlan, is_service, port: &str, known: &str, age_s| MacInfo {
            mac: mac.into(),
            vlan,
            is_service,
            port: port.into(),
            known: known.into(),
            age_s,
        };
        let macs = [
            mac("52:54:00:00:00:01", None, false, "web1", "guest", None),
            mac("52:54:00:00:00:02", Some(0), false, "lan", "heard", Some(65)),
            mac("52:54:00:00:00:03", Some(7), false, "lan", "heard", Some(0)),
            mac("52:54:00:00:00:04", Some(8), true, "lan", "heard", Some(1)),
        ];
        let mut text = Vec::new();
        table(&mut text, &macs).unwrap();
        assert_eq!(
            String::from_utf8(text).unwrap(),
            "MAC                VLAN         PORT  KNOWN  AGE\n\
             52:54:00:00:00:01  all          web1  guest  -\n\
             52:54:00:00:00:02  -            lan   heard  1 min 5 s\n\
             52:54:00:00:00:03  7            lan   heard  0 s\n\
             52:54:00:00:00:04  8 (802.1ad)  lan   heard  1 s\n"
        );
    }
}
