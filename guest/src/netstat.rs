//! Counters of a kernel's TCP: netstat(8)'s `TcpExt`.

/// The kernel's counters, for the caller's network namespace.
pub const FILE: &str = "/proc/thread-self/net/netstat";

/// The sum of all counters of `TcpExt` whose name begins with this, from a text like [`FILE`]'s;
/// `None` if there are none.
#[must_use]
pub fn counted(netstat: &str, name: &str) -> Option<u64> {
    let mut lines = netstat.lines().filter(|line| line.starts_with("TcpExt:"));
    let (names, values) = lines.next().zip(lines.next())?;
    let all = names.split(' ').zip(values.split(' '));
    let found = all.filter(|(is, _)| is.starts_with(name)).map(|(_, value)| value.parse().ok());
    found.collect::<Option<Vec<u64>>>().filter(|found| !found.is_empty()).map(|f| f.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_by_how_their_names_begin() {
        let text = "TcpExt: SyncookiesSent TCPACKSkippedSeq TCPACKSkippedPAWS\nTcpExt: 0 12 30\n\
                    IpExt: InNoRoutes\nIpExt: 1\n";
        assert_eq!(counted(text, "TCPACKSkippedSeq"), Some(12));
        assert_eq!(counted(text, "TCPACKSkipped"), Some(42));
        assert_eq!(counted(text, "InNoRoutes"), None);
    }
}
