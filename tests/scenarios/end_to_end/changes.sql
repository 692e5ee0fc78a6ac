-- Changes of every kind to rows with keys from FROM_ID on; each statement is a transaction unless
-- it says otherwise.
UPDATE every_type SET a_text = a_text || '!', a_jsonb = jsonb_set(coalesce(a_jsonb, '{}'), '{x}', '1'),
  ints = ints || 7, a_mood = 'happy' WHERE id BETWEEN FROM_ID AND FROM_ID + 99;
UPDATE every_type SET a_text = NULL, a_numeric = NULL, texts = NULL, a_mood = NULL, a_label = NULL,
  a_positive = NULL WHERE id BETWEEN FROM_ID + 100 AND FROM_ID + 120;
UPDATE every_type SET id = id + 500000 WHERE id BETWEEN FROM_ID + 121 AND FROM_ID + 140;
UPDATE every_type SET id = id WHERE id BETWEEN FROM_ID + 141 AND FROM_ID + 145;
DELETE FROM every_type WHERE id BETWEEN FROM_ID + 150 AND FROM_ID + 170;

-- Unchanged TOAST: with and without a change of key, and with one of two large values.
UPDATE documents SET title = title || ' changed' WHERE id BETWEEN FROM_ID AND FROM_ID + 20;
UPDATE documents SET id = id + 600000 WHERE id BETWEEN FROM_ID + 10 AND FROM_ID + 15;
UPDATE documents SET body = body || 'more' WHERE id BETWEEN FROM_ID + 21 AND FROM_ID + 30;
UPDATE documents SET attachment = NULL, title = NULL WHERE id BETWEEN FROM_ID + 31 AND FROM_ID + 35;
UPDATE documents SET body = title WHERE id BETWEEN FROM_ID + 36 AND FROM_ID + 40;
UPDATE documents SET id = id + 600000, body = 'short' WHERE id BETWEEN FROM_ID + 41 AND FROM_ID + 45;
DELETE FROM documents WHERE id BETWEEN FROM_ID + 50 AND FROM_ID + 55;

-- Cascades, which arrive as changes of their own.
DELETE FROM customers WHERE id % 10 = 3;
UPDATE customers SET id = id + 100000 WHERE id % 10 = 4 AND id < 100000;
DELETE FROM orders WHERE id % 20 = 7;
UPDATE order_lines SET line = line + 10 WHERE order_id % 7 = 1 AND line < 10;

UPDATE areas SET width = width + 1 WHERE id % 3 = 0;
UPDATE areas SET id = id + 700000 WHERE id % 5 = 0 AND id < 700000;
DELETE FROM areas WHERE id % 7 = 0;
UPDATE tickets SET subject = subject || '?' WHERE id % 2 = 0;
DELETE FROM tickets WHERE id % 9 = 0;
UPDATE wide_keys SET note = 'n2' WHERE c % 2 = 0;
UPDATE wide_keys SET d = d + 1000, a = a || 'x' WHERE c % 5 = 0 AND d < '2026-01-01';
UPDATE one_column SET id = -id WHERE id % 3 = 0;
DELETE FROM one_column WHERE id % 4 = 0;
-- Two unique values change places within one statement, and within one transaction.
UPDATE swaps SET id = id + 800000 WHERE id % 10 = 1 AND id < 800000;
UPDATE swaps SET place = 2 * FROM_ID + 11 - place WHERE id BETWEEN FROM_ID + 5 AND FROM_ID + 6;
BEGIN;
UPDATE swaps SET place = -FROM_ID WHERE id = FROM_ID + 3;
UPDATE swaps SET place = FROM_ID + 3 WHERE id = FROM_ID + 4;
UPDATE swaps SET place = FROM_ID + 4 WHERE id = FROM_ID + 3;
COMMIT;

-- Savepoints and whole transactions that are rolled back.
BEGIN;
INSERT INTO measured (value) VALUES (1.5);
SAVEPOINT a;
INSERT INTO measured (value) VALUES (-1);
DELETE FROM customers;
SAVEPOINT b;
UPDATE measured SET value = -2;
ROLLBACK TO a;
INSERT INTO measured (value) VALUES (2.5);
SAVEPOINT c;
INSERT INTO measured (value) VALUES (3.5);
RELEASE c;
COMMIT;
BEGIN;
DELETE FROM every_type;
TRUNCATE events;
ROLLBACK;
-- Transactions with nothing in them, or nothing that is published.
BEGIN; COMMIT;
BEGIN; CREATE TEMPORARY TABLE passing (x integer); INSERT INTO passing VALUES (1); DROP TABLE passing; COMMIT;
SELECT pg_logical_emit_message(true, 'prefix', 'ignored');
SELECT pg_logical_emit_message(false, 'prefix', 'ignored too');
-- A row that comes, changes and goes in one transaction.
BEGIN;
INSERT INTO events VALUES (now(), 'brief');
INSERT INTO wide_keys VALUES ('brief', md5('b')::uuid, 1, '2030-01-01', 'x');
UPDATE wide_keys SET note = 'y', c = 2 WHERE a = 'brief';
DELETE FROM wide_keys WHERE a = 'brief';
COMMIT;

UPDATE "Odd.Schema"."Odd ""Name""" SET "the ""value""" = 'changed', "Größe" = NULL, "a.b" = 'x', " " = '' WHERE "Id" % 2 = 0;
UPDATE "Odd.Schema"."Odd ""Name""" SET "Id" = -"Id" WHERE "Id" % 5 = 0;
DELETE FROM "Odd.Schema"."select" WHERE "from" % 3 = 0;
UPDATE "Odd.Schema"."select" SET "where" = 'changed' WHERE "from" % 2 = 0;
UPDATE "Odd.Schema"."таблица.с.точками" SET "имя" = 'другое', id = -id WHERE id % 2 = 0;
DELETE FROM "Odd.Schema"."$1; DROP TABLE x --" WHERE "$1" % 2 = 0;
UPDATE "Odd.Schema"."$1; DROP TABLE x --" SET "'" = '"' WHERE "$1" % 5 = 0;

-- 3,000 rows in one transaction, streamed before it commits.
BEGIN;
INSERT INTO events SELECT now(), repeat('e', 100) || i FROM generate_series(1, 3000) AS i;
INSERT INTO measured (value) SELECT i FROM generate_series(1, 3000) AS i;
UPDATE measured SET value = value + 1 WHERE value > 2000;
COMMIT;
