//! The symbols that an arm64 kernel's image carries for its own stack traces.
//!
//! Debian's image has no ELF symbols and its `System.map` is in a package of a gigabyte, but the kernel itself can name its
//! functions: `kernel/kallsyms.c`, made by `scripts/kallsyms.c`. The tables stand one behind the other, as Linux 6.4 and
//! later have them: number of symbols, names, markers (an offset into the names for each 256), tokens, index of the
//! tokens, and the symbols' offsets from the kernel's beginning. Older kernels have another order and give no symbols.

use std::ops::Range;

/// Tokens that a name's bytes stand for.
const TOKENS: usize = 256;
/// Symbols between two markers.
const MARKED: usize = 256;

/// A function: its offset from the kernel's beginning, and its name.
pub(crate) type Symbol = (u64, String);

/// Returns the functions of the kernel in `image`, in the order of their addresses. `None`: no such tables are there.
pub(crate) fn functions(image: &[u8]) -> Option<Vec<Symbol>> {
    let tables = Tables::find(image)?;
    let mut functions = Vec::new();
    let mut at = tables.names;
    for n in 0..tables.count {
        let (name, next) = tables.name(image, at)?;
        at = next;
        let offset = word(image, tables.offsets + 4 * n)?;
        // The first letter is nm's type; T, t, W and w are code. Names that begin with $ are the assembler's.
        if let Some((b'T' | b't' | b'W' | b'w', name)) = name.split_first()
            && !name.starts_with(b"$")
        {
            functions.push((offset.into(), String::from_utf8_lossy(name).into_owned()));
        }
    }
    functions.sort();
    Some(functions)
}

struct Tables {
    count: usize,
    names: usize,
    tokens: Vec<Range<usize>>,
    offsets: usize,
}

impl Tables {
    /// Finds the tables by the tokens of the digits, which every kernel has one behind the other, and by the index of the
    /// tokens, which must agree with them.
    fn find(image: &[u8]) -> Option<Self> {
        let digits: Vec<u8> = (b'0'..=b'9').flat_map(|digit| [digit, 0]).collect();
        let places = image.windows(digits.len()).enumerate();
        places
            .filter(|(_, window)| *window == digits)
            .find_map(|(place, _)| Self::around(image, place))
    }

    fn around(image: &[u8], zero: usize) -> Option<Self> {
        let begin = (0..b'0').try_fold(zero, |at, _| {
            let before = image.get(..at.checked_sub(1)?)?;
            Some(before.iter().rposition(|&byte| byte == 0)? + 1)
        })?;
        let mut tokens = Vec::with_capacity(TOKENS);
        let mut at = begin;
        for _ in 0..TOKENS {
            let length = image.get(at..)?.iter().position(|&byte| byte == 0)?;
            tokens.push(at..at + length);
            at += length + 1;
        }
        let index = at.next_multiple_of(4);
        let agrees = |index: usize| {
            let words = image.get(index..index + 2 * TOKENS)?.chunks_exact(2);
            let same = words.zip(&tokens).all(|(word, token)| {
                usize::from(u16::from_le_bytes([word[0], word[1]])) == token.start - begin
            });
            same.then_some(index)
        };
        let index = agrees(index).or_else(|| agrees(at.next_multiple_of(8)))?;
        let (markers, count) = Self::markers(image, begin)?;
        let (names, count) = Self::names(image, markers, count)?;
        Some(Self {
            count,
            names,
            tokens,
            offsets: index + 2 * TOKENS,
        })
    }

    /// The markers end before the tokens, at `end`; zeros may stand between. Returns their place and number.
    fn markers(image: &[u8], end: usize) -> Option<(usize, usize)> {
        let mut at = (end & !3).checked_sub(4)?;
        while word(image, at)? == 0 {
            at = at.checked_sub(4)?;
        }
        let last = at;
        while word(image, at.checked_sub(4)?)? < word(image, at)? {
            at -= 4;
        }
        Some((at, (last - at) / 4 + 1))
    }

    /// The number of symbols and their names end before the markers.
    fn names(image: &[u8], markers: usize, count: usize) -> Option<(usize, usize)> {
        let last = word(image, markers + 4 * (count - 1))? as usize;
        let second = word(image, markers + 4)? as usize;
        let symbols = (count - 1) * MARKED + 1..=count * MARKED;
        // Behind the last marker are at most as many names of at most as many bytes.
        let latest = markers.checked_sub(last)? & !7;
        let earliest = latest.saturating_sub(MARKED * 512);
        (earliest..=latest).rev().step_by(8).find_map(|names| {
            let number = word(image, names.checked_sub(8)?)? as usize;
            let end = (0..MARKED).try_fold(names, |at, _| Some(name(image, at)?.end))?;
            (symbols.contains(&number) && end == names + second).then_some((names, number))
        })
    }

    /// The name at `at` with its type in front, and the place of the next.
    fn name(&self, image: &[u8], at: usize) -> Option<(Vec<u8>, usize)> {
        let bytes = name(image, at)?;
        let end = bytes.end;
        let tokens = image.get(bytes)?.iter();
        let text = tokens
            .flat_map(|&token| &image[self.tokens[usize::from(token)].clone()])
            .copied()
            .collect();
        Some((text, end))
    }
}

/// The tokens of the name at `at`. Its length has one byte, or two where the first has bit 7.
fn name(image: &[u8], at: usize) -> Option<Range<usize>> {
    let short = usize::from(*image.get(at)?);
    let (begin, length) = if short & 0x80 == 0 {
        (at + 1, short)
    } else {
        (at + 2, short & 0x7f | usize::from(*image.get(at + 1)?) << 7)
    };
    Some(begin..begin + length)
}

fn word(image: &[u8], at: usize) -> Option<u32> {
    let bytes = image.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An image with `names` at offsets 0x100 apart; each byte is its own token.
    fn image(names: &[String]) -> Vec<u8> {
        let align =
            |image: &mut Vec<u8>, to: usize| image.resize(image.len().next_multiple_of(to), 0);
        // No image begins with its tables.
        let mut image = b"no tables yet; 0\x001\x002\x00".to_vec();
        align(&mut image, 8);
        image.extend((names.len() as u64).to_le_bytes());
        let (begin, mut markers) = (image.len(), Vec::new());
        for (n, name) in names.iter().enumerate() {
            if n % MARKED == 0 {
                markers.push((image.len() - begin) as u32);
            }
            image.push(name.len() as u8);
            image.extend(name.as_bytes());
        }
        align(&mut image, 8);
        image.extend(markers.iter().flat_map(|marker| marker.to_le_bytes()));
        align(&mut image, 8);
        let mut index = Vec::new();
        let tokens = image.len();
        for token in 0..=255_u8 {
            index.extend(((image.len() - tokens) as u16).to_le_bytes());
            image.extend([token.max(1), 0]);
        }
        align(&mut image, 8);
        image.extend(index);
        image.extend((0..names.len() as u32).flat_map(|n| (n * 0x100).to_le_bytes()));
        image
    }

    #[test]
    fn functions_are_found_and_data_is_not() {
        let names: Vec<String> = (0..1000)
            .map(|n| match n % 4 {
                0 => format!("Tfunction_{n}"),
                1 => format!("t$x.{n}"),
                2 => format!("Ddata_{n}"),
                _ => format!("tlocal_{n}"),
            })
            .collect();
        let functions = functions(&image(&names)).unwrap();
        assert_eq!(functions.len(), 500);
        assert_eq!(functions[0], (0, "function_0".to_owned()));
        assert_eq!(functions[499], (999 * 0x100, "local_999".to_owned()));
    }

    #[test]
    fn no_file_makes_it_panic() {
        let names: Vec<String> = (0..600).map(|n| format!("Tf{n}")).collect();
        let whole = image(&names);
        for length in (0..whole.len()).step_by(7) {
            let _ = functions(&whole[..length]);
        }
        assert_eq!(functions(b""), None);
    }
}
