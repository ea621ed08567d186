//! The guest's command, as a line for its shell.

use itertools::Itertools;

/// A command for the guest's shell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Command(String);

impl Command {
    /// Makes a command of the words after `--`. Several words are a program and
    /// its arguments, passed unchanged; a single word is a line for the shell
    /// (`a | b > c`). Returns `None` without a word.
    pub fn from_words(words: &[String]) -> Option<Self> {
        match words {
            [] => None,
            [line] => Some(Self(line.clone())),
            words => Some(Self(words.iter().map(|word| quote(word)).join(" "))),
        }
    }

    /// Returns the line for the shell.
    pub fn as_line(&self) -> &str {
        &self.0
    }
}

/// Quotes a word for the shell, only where that is needed.
pub fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:,=+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Option<Command> {
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        Command::from_words(&words)
    }

    #[test]
    fn one_word_is_a_shell_line() {
        let command = words(&["gzip -c random.bin > /dev/null"]).unwrap();
        assert_eq!(command.as_line(), "gzip -c random.bin > /dev/null");
        assert_eq!(words(&[]), None);
    }

    #[test]
    fn several_words_stay_words() {
        let command = words(&["printf", "%s\n", "it's", "", "a>b", "x=y"]).unwrap();
        assert_eq!(command.as_line(), "printf '%s\n' 'it'\\''s' '' 'a>b' x=y");
    }
}
