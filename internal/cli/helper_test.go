package cli

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
)

func allCommands(c *cobra.Command) []*cobra.Command {
	all := []*cobra.Command{c}
	for _, sub := range c.Commands() {
		all = append(all, allCommands(sub)...)
	}
	return all
}

// jsonPath follows a path like items.0.handle through a document.
func jsonPath(doc []byte, path string) (string, error) {
	var v any
	if err := json.Unmarshal(doc, &v); err != nil {
		return "", fmt.Errorf("not JSON: %w: %.200s", err, doc)
	}
	for step := range strings.SplitSeq(path, ".") {
		switch node := v.(type) {
		case map[string]any:
			v = node[step]
		case []any:
			i, err := strconv.Atoi(step)
			if err != nil || i >= len(node) {
				return "", fmt.Errorf("no element %s of %d", step, len(node))
			}
			v = node[i]
		default:
			return "", fmt.Errorf("nothing at %s", step)
		}
	}
	if v == nil {
		return "", fmt.Errorf("nothing at %s in %.300s", path, doc)
	}
	return fmt.Sprint(v), nil
}
