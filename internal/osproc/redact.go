package osproc

import (
	"regexp"
	"strings"
	"sync"
)

const redacted = "[REDACTED]"

// secretPatterns find what looks like a secret in the words of a program. They
// are made at first use: most programs that link this package never do.
var secretPatterns = sync.OnceValue(func() []*regexp.Regexp {
	return []*regexp.Regexp{
		// The whole header line: there may be a scheme before the credential.
		regexp.MustCompile(`(?i)((?:proxy-)?authorization["']?\s*[:=]\s*["']?)[^\r\n"']+`),
		regexp.MustCompile(`(?i)(\bbearer\s+)[^\s"',;]+`),
		regexp.MustCompile(`(?i)((?:[a-z0-9]+[_-])*(?:run[_-]?token|mcp[_-]?token|auth[_-]?token|access[_-]?token|api[_-]?key|secret|password|passwd)["']?\s*[:=]\s*)(?:"[^"\r\n]*"|'[^'\r\n]*'|[^\s"',;]+)`),
		// A password in a URL, such as a proxy's.
		regexp.MustCompile(`(://[^/\s:@"']*:)[^/\s@"']+(@)`),
		// Keys of the model vendors, and our own, wherever they stand.
		regexp.MustCompile(`()\b(?:sk-[A-Za-z0-9_-]{8,}|st[kr]_[a-z2-7]{26}_[a-z2-7]{52})`),
	}
})

// minSecret is how short a value may be to be taken out by itself: shorter ones
// would turn ordinary words into holes.
const minSecret = 6

// Redact takes out of text the given secrets and whatever looks like one:
// authorization headers, bearer tokens, assignments to token, key, secret and
// password names, passwords in URLs, keys of the known forms.
func Redact(text string, secrets ...string) string {
	for _, s := range secrets {
		if len(s) >= minSecret {
			text = strings.ReplaceAll(text, s, redacted)
		}
	}
	for _, p := range secretPatterns() {
		text = p.ReplaceAllString(text, "${1}"+redacted+"${2}")
	}
	return text
}
