//! `[toe]`: guests' sockets on other hosts.

use super::keys::{Keys, plain};
use super::reader::{Section, integer};

/// Where hosts connect to each other, if nobody says otherwise.
const PORT: u16 = 4793;

/// `[toe]`: the virtual TOE between hosts. Without it sockets go to guests of this host alone.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ToeConfig {
    /// The TCP port that all hosts listen at, at their overlays' addresses. Default 4793.
    pub port: u16,
}

impl ToeConfig {
    /// All keys of `[toe]`.
    #[must_use]
    pub fn keys(&self) -> Keys {
        vec![("port", plain(self.port))]
    }
}

pub(super) fn read(mut s: Section<'_, '_>, has_overlays: bool) -> ToeConfig {
    let port = s.get("port", "give a TCP port; 4793 is the default", integer(1..=65535));
    if !has_overlays {
        let what = "needs an [[overlay]]: sockets reach what its frames reach".into();
        s.problem("port", what, "add the overlay that both hosts' VMs are on, or remove [toe]");
    }
    s.finish();
    ToeConfig { port: port.and_then(|n| u16::try_from(n).ok()).unwrap_or(PORT) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::Config;
    use super::*;

    fn parse(toe: &str, overlay: &str) -> Result<ToeConfig, String> {
        let text = format!("{toe}\n{overlay}\n[[vm]]\nname = \"a\"\n");
        let config = Config::parse("np.toml", &text, &BTreeMap::new());
        config.map(|config| config.toe.unwrap()).map_err(|e| e.to_string())
    }

    #[test]
    fn an_empty_table_is_enough_with_an_overlay() {
        let overlay = "[[overlay]]\nname = \"o\"\nvni = 7\nlocal = \"192.0.2.1\"\n\
                       peers = [\"192.0.2.2\"]\n";
        assert_eq!(parse("[toe]", overlay), Ok(ToeConfig { port: PORT }));
        assert_eq!(parse("[toe]\nport = 5000", overlay), Ok(ToeConfig { port: 5000 }));
        for (toe, overlay, said) in
            [("[toe]", "", "toe.port: needs an [[overlay]]"), ("[toe]\nport = 0", overlay, "fix: ")]
        {
            let error = parse(toe, overlay).unwrap_err();
            assert!(error.contains(said) && error.contains("fix: "), "{error}");
        }
    }
}
