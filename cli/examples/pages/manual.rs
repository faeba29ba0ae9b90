//! The parts of manual pages besides the arguments, and a page made of a Markdown page.

use std::fmt::Write;

/// A section of a page: its heading, and entries of a term and its text.
type Section = (&'static str, &'static [(&'static str, &'static str)]);

/// Of the page of `program`.
pub(crate) fn sections(program: &str) -> String {
    let sections: &[Section] = match program {
        "nightporter" => TOOL,
        "nightporterd" => DAEMON,
        "nightporter-boost" => BOOSTER,
        _ => COMMAND,
    };
    let mut page = String::new();
    for (heading, entries) in sections {
        let _ = writeln!(page, ".SH {heading}");
        for (term, text) in *entries {
            let _ = writeln!(page, ".TP\n\\fB{}\\fR\n{}", plain(term), plain(text));
        }
    }
    page
}

/// The examples of a command of the tool.
pub(crate) fn examples(examples: &[(&str, &str)]) -> String {
    let mut page = String::from(".SH EXAMPLES\n");
    for (arguments, text) in examples {
        let _ = writeln!(page, ".TP\n\\fBnightporter {}\\fR\n{}", plain(arguments), plain(text));
    }
    page
}

const TOOL: &[Section] = &[
    (
        "EXAMPLES",
        &[
            ("nightporter advise", "Which VMs of this host wait for a core. Needs no daemon."),
            ("nightporter vm list --watch", "All VMs, with rates, every second."),
            ("nightporter vm show web1", "All about a VM, and why its link is down."),
            ("nightporter attach vnet0", "A running VM with a tap has ack offload from now on."),
            ("nightporter vm add web3 mac=52:54:00:00:00:03 budget=128M", "A VM comes."),
            ("nightporter flows --vm web1 --sort held", "Connections, those that owe most first."),
            ("nightporter flow 7 --trace", "The segments of a connection, as they pass."),
            (
                "nightporter capture web1 -w web1.pcap",
                "The frames of a port, for tcpdump or Wireshark.",
            ),
            ("nightporter drain web1", "Before a VM is removed: waits until nothing is owed."),
        ],
    ),
    (
        "FILES",
        &[
            (
                "/run/nightporter/control.sock",
                "The daemon's control socket: for root and its user.",
            ),
            ("/etc/nightporter/nightporter.toml", "Its configuration: see nightporter.toml(5)."),
        ],
    ),
    EXIT_STATUS,
];

/// Of the tool and of each of its commands.
const EXIT_STATUS: Section = (
    "EXIT STATUS",
    &[
        ("0", "It is done, or was shown."),
        (
            "1",
            "It is not, also because of a word that the command does not know, as in nightporter \
             offload web1 maybe: standard error says why, and a line with \"fix:\" what to do.",
        ),
        ("2", "An option or a command is unknown, or an argument is missing or has another form."),
    ],
);

/// Of each command of the tool.
const COMMAND: &[Section] = &[
    EXIT_STATUS,
    (
        "SEE ALSO",
        &[("nightporter(1)", "All commands, and files."), ("nightporter.toml(5)", "All keys.")],
    ),
];

const BOOSTER: &[Section] = &[
    (
        "EXAMPLES",
        &[
            ("systemctl enable --now nightporter-boost", "VMs with vm.boost are boosted."),
            ("nightporter-boost --take-back", "After a crash of the unit, which runs it itself."),
        ],
    ),
    (
        "FILES",
        &[
            ("/run/nightporter/boost.sock", "The daemon's socket, beside its control socket."),
            ("/run/nightporter-boost/journal", "The vCPUs that are favoured now."),
        ],
    ),
    (
        "EXIT STATUS",
        &[
            ("0", "It was told to stop, and has taken all back."),
            ("1", "It did not start, or had to end: standard error says why."),
            ("2", "The arguments are wrong."),
        ],
    ),
];

const DAEMON: &[Section] = &[
    (
        "EXAMPLES",
        &[
            (
                "nightporterd --config /etc/nightporter/nightporter.toml --check",
                "Checks the file and this host, and starts nothing.",
            ),
            (
                "nightporterd --config nightporter.toml --set log=info,nightporterd::vhost=debug",
                "With each message of a VMM in the log.",
            ),
            ("journalctl -u nightporterd -p warning", "Warnings and errors alone."),
        ],
    ),
    (
        "FILES",
        &[
            ("/etc/nightporter/nightporter.toml", "The configuration: see nightporter.toml(5)."),
            ("/run/nightporter", "The control socket, the VMs' sockets, the store (arena)."),
        ],
    ),
    (
        "EXIT STATUS",
        &[
            ("0", "It was told to stop and has stopped, or --check has found nothing."),
            ("1", "It did not start, or had to end: the log says why."),
            ("2", "The arguments are wrong."),
        ],
    ),
];

/// Text as roff prints it: no line is a request, no character an escape.
fn plain(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

/// Text with `code` in bold, and links as their words. `is_code`: it begins within code, which may
/// go over several lines.
fn inline(text: &str, is_code: &mut bool) -> String {
    let mut words = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("](") {
        words += &before.replacen('[', "", 1);
        rest = after.split_once(')').map_or("", |(_, behind)| behind);
    }
    let words = (words + rest).replace("**", "");
    let mut line = String::new();
    for (i, part) in words.split('`').enumerate() {
        *is_code ^= i > 0;
        let text = part.replace('\\', "\\e").replace('-', "\\-");
        line += &if *is_code { format!("\\fB{text}\\fR") } else { text };
    }
    if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line }
}

/// A Markdown page (headings, paragraphs, lists, tables, examples) as the manual page `title`.
pub(crate) fn of_markdown(title: &str, section: u8, summary: &str, markdown: &str) -> String {
    let mut page = format!(
        ".TH \"{title}\" {section}\n.SH NAME\n{} \\- {}\n.SH DESCRIPTION\n",
        plain(title),
        plain(summary)
    );
    let (mut is_example, mut is_table, mut is_code) = (false, false, false);
    for line in markdown.lines().skip_while(|line| line.starts_with("# ")) {
        let table = line.starts_with('|') && !is_example;
        if table != is_table {
            page += if table { ".PP\n.nf\n" } else { ".fi\n" };
            is_table = table;
        }
        is_code &= !line.is_empty();
        let mut shown = |prefix: &str, text: &str| prefix.to_owned() + &inline(text, &mut is_code);
        let made = if line.starts_with("```") {
            is_example = !is_example;
            if is_example { ".PP\n.RS 4\n.nf".into() } else { ".fi\n.RE".into() }
        } else if is_example {
            plain(line)
        } else if line.starts_with("|---") {
            continue;
        } else if let Some(heading) = line.strip_prefix("## ") {
            format!(".SH {}", plain(&heading.replace('`', "").to_uppercase()))
        } else if let Some(heading) = line.strip_prefix("### ") {
            shown(".SS ", heading)
        } else if let Some(entry) = line.trim_start().strip_prefix("- ") {
            shown(".IP \\(bu 2\n", entry)
        } else if line.is_empty() {
            ".PP".into()
        } else if line.starts_with("    ") {
            shown(".br\n", line.trim_start())
        } else {
            shown("", line.trim_matches('|').trim())
        };
        page += &(made + "\n");
    }
    page
}
