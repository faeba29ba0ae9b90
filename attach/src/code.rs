//! The code of the programs, and the constants that it gets when it is loaded.
//!
//! `bpf/turn.bpf.c` is the source. `bpf/turn.txt` is what clang makes of it, an instruction of
//! eight bytes in each line; a test compares the two where clang is. Where the source has a
//! constant, the code loads a number of 64 bits that nothing else in it has (`CONSTANT`).

/// Code in the form of a text, of all programs.
pub const TEXT: &str = include_str!("../bpf/turn.txt");

/// The programs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Program {
    /// Turns what the VM sends.
    TurnFromVm,
    /// Turns what is sent to the VM.
    TurnFromNet,
    /// Lets only turned frames into the daemon's taps.
    Only,
    /// Gives back what the daemon writes.
    Back,
}

impl Program {
    /// The name of the section in the source, and of the program in the kernel.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::TurnFromVm | Self::TurnFromNet => "turn",
            Self::Only => "only",
            Self::Back => "back",
        }
    }
}

/// One instruction, as in memory.
pub(crate) type Instruction = [u8; 8];

/// The constants of a program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Constants {
    pub(crate) mark: u32,
    /// The interface to which frames go.
    pub(crate) target: u32,
    /// Of bpf_redirect.
    pub(crate) flags: u32,
    /// The descriptor of the area.
    pub(crate) area: i32,
    /// The place of the count of plain frames in it.
    pub(crate) plain_at: u32,
}

/// The number of the first constant; those of the others follow (`bpf/turn.bpf.c`).
const FIRST: u64 = 0x4e50_0000_0000_0001;
/// The operation that loads 64 bits by two instructions (linux/bpf.h: BPF_LD | BPF_IMM | BPF_DW).
const LOAD_WIDE: u8 = 0x18;
/// In the place of its source register: the number is a place in the value of a map
/// (BPF_PSEUDO_MAP_VALUE).
const MAP_VALUE: u8 = 2;

/// Code whose constants are still to be put in.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Code(Vec<Instruction>);

/// The code of a program.
///
/// # Panics
/// On a text that is damaged, which a test excludes.
#[must_use]
pub fn of(program: Program) -> Code {
    let lines = TEXT.lines().skip_while(|line| line.strip_suffix(':') != Some(program.name()));
    let lines = lines.skip(1).take_while(|line| !line.ends_with(':'));
    Code(lines.map(|line| parse(line).expect("two digits for each of eight bytes")).collect())
}

fn parse(line: &str) -> Option<Instruction> {
    let mut bytes = line.split(' ').map(|byte| u8::from_str_radix(byte, 16).ok());
    let mut instruction = [0; 8];
    for to in &mut instruction {
        *to = bytes.next()??;
    }
    bytes.next().is_none().then_some(instruction)
}

impl Code {
    /// From the bytes of an ELF section.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Self(bytes.as_chunks().0.to_vec())
    }

    /// The lines of the text.
    #[must_use]
    pub fn to_text(&self) -> String {
        let line = |instruction: &Instruction| {
            instruction.map(|byte| format!("{byte:02x}")).join(" ") + "\n"
        };
        self.0.iter().map(line).collect()
    }

    /// With its constants in it.
    pub(crate) fn with(mut self, constants: &Constants) -> Vec<Instruction> {
        let &Constants { mark, target, flags, area, plain_at } = constants;
        let mut at = 0;
        while let Some([low, high, ..]) = self.0.get_mut(at..) {
            if low[0] != LOAD_WIDE {
                at += 1;
                continue;
            }
            let (map, value) = match number(low, high).wrapping_sub(FIRST) {
                0 => (false, (mark, 0)),
                1 => (false, (target, 0)),
                2 => (false, (flags, 0)),
                3 => (true, (area.cast_unsigned(), 0)),
                4 => (true, (area.cast_unsigned(), plain_at)),
                _ => unreachable!("a test compares the text with the source"),
            };
            if map {
                low[1] |= MAP_VALUE << 4;
            }
            low[4..].copy_from_slice(&value.0.to_ne_bytes());
            high[4..].copy_from_slice(&value.1.to_ne_bytes());
            at += 2;
        }
        self.0
    }
}

/// The number that two instructions load.
fn number(low: &Instruction, high: &Instruction) -> u64 {
    let [.., a, b, c, d] = *low;
    let [.., e, f, g, h] = *high;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}
