//! Checks the workload's branches as `perf script` prints them, against the sequence that the workload is known to take.

use std::fmt::Write;

/// Bits that the workload's `bar` shifts out, one each round: as `lab/guest-tools/src/mix.rs` has them.
fn bits_of_bar() -> String {
    const SEED: u16 = 0xace1;
    const FEEDBACK: u16 = 0xb400;
    const ROUNDS: usize = 4285;
    let (mut state, mut bits) = (SEED, String::new());
    for _ in 0..ROUNDS {
        let bit = state & 1;
        let _ = write!(bits, "{bit}");
        state = state >> 1 ^ if bit == 1 { FEEDBACK } else { 0 };
    }
    bits
}

/// Returns a program for awk that reads what `perf script -F brstacksym` prints of the workload. It names each branch by a
/// letter, and checks whether the program takes the letters of a sample one after the other: loops are longer than a
/// stack, so that one has no more than the end of one loop and the beginning of the next. A sample with a branch outside the
/// loops is skipped. Which way `bar` goes follows from the bits that it shifts out.
pub(super) fn checker(depth: u32) -> String {
    const PROGRAM: &str = r#"
function hex(text,   n, i) { n = 0; for (i = 1; i <= length(text); i++) n = n * 16 + index("0123456789abcdef", substr(text, i, 1)) - 1; return n }
function letter(from, to,   a, b, by) {
    split(from, a, /\+0x/); split(to, b, /\+0x/); by = hex(b[2]) - hex(a[2])
    if (a[1] == b[1]) {
        if (a[1] == "foo" && by < 0) return "f"
        if (a[1] == "qux" && by < 0) return "q"
        if (a[1] == "main" && by < 0) return by > -8 ? "m" : "u"
        if (a[1] == "bar") return by < 0 ? "l" : by == 6 ? "0" : by == 4 ? "1" : "?"
        return "?"
    }
    if (a[1] == "main" && hex(b[2]) == 0) return b[1] == "foo" ? "F" : b[1] == "bar" ? "B" : b[1] == "qux" ? "Q" : "e"
    if (b[1] == "main" && hex(b[2]) > 0) return a[1] == "foo" ? "x" : a[1] == "bar" ? "y" : a[1] == "qux" ? "z" : "e"
    return a[1] b[1] ~ /^(main|foo|bar|qux)(main|foo|bar|qux)$/ ? "?" : "e"
}
function in_bar(path, begins, ends,   bits, at) {
    if (path !~ /^l?([01]l)*[01]?$/ || (begins && path ~ /^l/) || (ends && path ~ /l$/)) return 0
    bits = path; gsub(/l/, "", bits)
    if (begins) return substr(BITS, 1, length(bits)) == bits
    if (ends) return substr(BITS, length(BITS) - length(bits) + 1) == bits
    return index(BITS, bits) > 0
}
function right(path,   part) {
    part = path
    if (path ~ /^(um*|m*(Ff*)?|f*x?|Qq*|q*(z(um*)?)?)$/) return 1
    if (path ~ /^(f*x)?B[01l]*$/) return sub(/^(f*x)?B/, "", part) && in_bar(part, 1, 0)
    if (path ~ /^[01l]*y(Qq*)?$/) return sub(/y(Qq*)?$/, "", part) && in_bar(part, 0, 1)
    return path ~ /^[01l]*$/ && in_bar(part, 0, 0)
}
NF > 0 {
    path = ""
    for (i = 1; i <= NF; i++) { split($i, word, "/"); path = letter(word[1], word[2]) path }
    samples++; full += NF == DEPTH
    if (path ~ /e/) { skipped++; next }
    branches += NF
    if (!right(path)) { wrong += NF; if (shown++ < 5) print "path", path, $0 }
}
END { print "skipped", skipped + 0; print "checked", branches + 0; print "wrong", wrong + 0; print "full", 100 * full / samples }"#;
    PROGRAM
        .replace("DEPTH", &depth.to_string())
        .replace("BITS", &format!("\"{}\"", bits_of_bar()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what the checker says of one sample's stack, the last branch first.
    fn checked(stack: &str) -> String {
        let program = checker(3);
        let script = format!("printf '%s\\n' '{stack}' | awk '{program}'");
        let output = std::process::Command::new("sh")
            .args(["-c", &script])
            .output();
        let output = output.expect("a shell");
        String::from_utf8(output.stdout).expect("text")
    }

    #[test]
    fn a_stack_that_the_program_cannot_take_is_wrong() {
        let foo = "foo+0xf/foo+0x5";
        let right = format!("{foo} {foo} main+0x1a/foo+0x0");
        assert_eq!(checked(&right), "skipped 0\nchecked 3\nwrong 0\nfull 100\n");
        let wrong = format!("{foo} main+0x1a/foo+0x0 {foo}");
        assert!(checked(&wrong).contains("wrong 3"));
        // From one function into another there are calls and returns of main's alone.
        for branch in ["qux+0x10/foo+0x5", "main+0x1a/foo+0x8"] {
            assert!(checked(&format!("{foo} {branch}")).contains("wrong 2"));
        }
        let outside = checked(&format!("{foo} main+0x40/write+0x0"));
        assert_eq!(outside, "skipped 1\nchecked 0\nwrong 0\nfull 0\n");
        // `bar` begins with a 1, and then has 0000.
        let begins = |bit: &str| checked(&format!("{bit} main+0x24/bar+0x0 foo+0x11/main+0x1f"));
        assert!(begins("bar+0x16/bar+0x1a").contains("wrong 0"));
        assert!(begins("bar+0x12/bar+0x18").contains("wrong 3"));
    }

    #[test]
    fn a_stack_may_begin_and_end_at_any_branch() {
        let (foo, qux) = ("foo+0x14/foo+0x5", "qux+0x10/qux+0xc");
        for stack in [
            format!("foo+0x16/main+0x20 {foo}"),
            "bar+0x16/bar+0x1a main+0x25/bar+0x0".to_owned(),
            "bar+0x1f/main+0x2a bar+0x12/bar+0x18 bar+0x1d/bar+0x10".to_owned(),
            format!("{qux} main+0x2f/qux+0x0"),
            format!("qux+0x12/main+0x34 {qux}"),
            "main+0x36/main+0x2 qux+0x12/main+0x34".to_owned(),
        ] {
            assert!(checked(&stack).contains("wrong 0"), "{stack}");
        }
        // The other way round.
        for stack in [
            format!("{foo} foo+0x16/main+0x20"),
            "main+0x25/bar+0x0 bar+0x16/bar+0x1a".to_owned(),
            format!("main+0x2f/qux+0x0 {qux}"),
        ] {
            assert!(checked(&stack).contains("wrong 2"), "{stack}");
        }
    }
}
