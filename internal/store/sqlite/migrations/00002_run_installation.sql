-- Which installed plugin a run acts for: JSON, empty for any other run.

-- +goose Up
ALTER TABLE runs ADD COLUMN installation TEXT NOT NULL DEFAULT '';
